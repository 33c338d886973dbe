"""/openapi.json is accurate: what it forbids is refused, every status is told, nothing crashes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.front.live import LiveFront, live_front

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
OPERATIONS = 14


def _schemathesis(front: LiveFront, examples: int, *more: str) -> None:
    program = Path(sys.executable).with_name("schemathesis")
    flags = ["--checks", ",".join(CHECKS), "--max-examples", str(examples), "--no-color", *more]
    done = subprocess.run(
        [program, "run", f"{front.url}/openapi.json", *flags],
        capture_output=True,
        text=True,
        cwd=front.directory,  # it keeps a database of examples where it runs
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert f"Tested: {OPERATIONS}" in done.stdout
    assert "Traceback" not in front.log


def test_schemathesis_finds_nothing(default_model: Path) -> None:
    # A short context, so that answers of any allowed length are quick.
    with live_front(default_model, "--max-body-bytes=1MiB", start={"max_model_len": 64}) as front:
        _schemathesis(front, 5, "--seed", "1", "--phases", "coverage,fuzzing")
        front.until_ready()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_schemathesis_finds_nothing_in_many_tries(default_model: Path) -> None:
    with live_front(default_model, "--max-body-bytes=1MiB", start={"max_model_len": 64}) as front:
        _schemathesis(front, 300)
        front.until_ready()

"""Results as people and programs read them: closing lines `name=value unit`, and one JSON file a benchmark.

Knows nothing of what was measured.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def processor() -> str:
    """The CPU's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def gpu() -> dict[str, str]:
    """Name and driver of the GPU."""
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {"card": torch.cuda.get_device_name(), "driver": (done.stdout.split() or ["unknown"])[0]}


def commit() -> str:
    """The commit measured, `-dirty` if the tree differs; HOTSET_COMMIT where there is no repository."""
    if named := os.environ.get("HOTSET_COMMIT"):
        return named
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def write(name: str, result: Mapping[str, Any]) -> Path:
    """Write results/`name`.json with date, machine and commit."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    header = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit(),
    }
    path.write_text(json.dumps(header | dict(result), indent=2) + "\n")
    return path

"""Generate the Python stubs of proto/hotset/v1, beside their sources.

Runs by hand (`make stubs`) and as a build hook of the wheel, editable ones included. Stubs import
each other as `hotset.v1`, which is where they lie below `proto/`, so nothing is patched.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from grpc_tools import protoc
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROTO_ROOT = Path(__file__).resolve().parent


def generate() -> list[Path]:
    """Write `*_pb2.py`, `*_pb2_grpc.py` and their `.pyi`; return the sources used.

    Raises:
        RuntimeError: protoc refused a source; its message is on standard error.
    """
    import grpc_tools

    sources = sorted(PROTO_ROOT.glob("hotset/v1/*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    arguments = [
        "protoc",
        f"-I{PROTO_ROOT}",
        f"-I{well_known}",
        f"--python_out={PROTO_ROOT}",
        f"--grpc_python_out={PROTO_ROOT}",
        f"--mypy_out={PROTO_ROOT}",
        f"--mypy_grpc_out={PROTO_ROOT}",
        *map(str, sources),
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed; see the message above")
    return sources


class StubsHook(BuildHookInterface):  # type: ignore[type-arg]  # hatchling's generic has no public argument
    """Hatchling's entry: generate before files are collected."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate()
        build_data["artifacts"].extend(["proto/hotset/v1/*_pb2*.py", "proto/hotset/v1/*_pb2*.pyi"])


if __name__ == "__main__":
    for source in generate():
        print(f"generated {source.relative_to(PROTO_ROOT)}", file=sys.stderr)

"""The flags of `hotset doctor`, and its lines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from services.command.doctor.checks import Check, judge
from services.command.doctor.facts import look
from services.contract.byte_size import parse_bytes

_SIGNS = {"ok": "ok  ", "note": "note", "fail": "FAIL"}


def run(arguments: Sequence[str]) -> int:
    """Exit status: 0 nothing is in the way, 1 something is."""
    parser = argparse.ArgumentParser(
        prog="hotset doctor",
        description="Look at this machine, and say what to type where something is missing.",
    )
    parser.add_argument("--arena-dir", type=Path, default=Path("/dev/shm"), help="where the arena is to lie")
    parser.add_argument("--arena-bytes", type=_size, default=2**30, help="that it is to have (1GiB)")
    parser.add_argument("--port", type=int, default=8000, help="of the HTTP server (default: %(default)s)")
    parser.add_argument("--gpu", action="store_true", help="a GPU is wanted: its absence is a failure")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args(arguments)
    checks = judge(look(asked.arena_dir, (asked.port,)), asked.arena_bytes, need_gpu=asked.gpu)
    if asked.json:
        sys.stdout.write(json.dumps([asdict(check) for check in checks], indent=2) + "\n")
    else:
        print(lines(checks))
    return 1 if any(check.verdict == "fail" for check in checks) else 0


def lines(checks: Sequence[Check]) -> str:
    """A line a check; below one that asks for it, what to type."""
    told = []
    for check in checks:
        told.append(f"{_SIGNS[check.verdict]}  {check.name:<15}{check.found}")
        if check.advice:
            told.append(f"{'':21}> {check.advice}")
    failed = sum(check.verdict == "fail" for check in checks)
    told.append("" if failed else "\nNothing is in the way: hotset serve")
    if failed:
        told.append(
            f"{failed} thing{'s are' if failed > 1 else ' is'} in the way; type what stands behind >."
        )
    return "\n".join(told)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error

"""Byte counts as people write them: `512MiB`, `2GiB`, `1.5 GB`, `4096`.

Knows nothing of what the bytes are for.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_PATTERN = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*$", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """Bytes meant by `text`; a plain number is bytes.

    Raises:
        ValueError: not a number with one of the units B, KiB, MiB, GiB, TiB, kB, MB, GB, TB.
    """
    if isinstance(text, int):
        return text
    match = _PATTERN.match(text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write for example 512MiB, 2GiB or 1000000")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_bytes(count: int) -> str:
    """`count` with three significant figures and a binary unit, for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:,.4g} TiB"


ByteSize = Annotated[int, BeforeValidator(parse_bytes)]

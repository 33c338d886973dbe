"""Byte counts as people write them: `512MiB`, `2GiB`, `1.5 GB`, `4096`.

Knows nothing of what the bytes are for.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated

from pydantic import BeforeValidator

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_PATTERN = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)


def parse_bytes(text: object) -> int:
    """Bytes meant by `text`; a plain number is bytes, part of a byte is dropped.

    Args:
        text: a string, or an int as a TOML file gives it.

    Raises:
        ValueError: not a number with one of the units B, KiB, MiB, GiB, TiB, kB, MB, GB, TB.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write for example 512MiB, 2GiB or 1000000")
    return int(Fraction(match[1]) * _UNITS[match[2].lower()])


def format_bytes(count: int) -> str:
    """`count` in a binary unit with three significant figures, four from 1,000 on; for people."""
    value = float(count)
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1023.5:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}" if abs(value) < 999.5 else f"{value:,.0f} {unit}"


ByteSize = Annotated[int, BeforeValidator(parse_bytes)]

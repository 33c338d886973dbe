"""What tests of the transport nixl need: the package, which is optional."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

import pytest
from _pytest.mark import ParameterSet

from services.contract.transport.nixl_library import INSTALL

NEEDS_NIXL = pytest.mark.skipif(find_spec("nixl_cu13") is None, reason=f"no nixl-cu13 here: {INSTALL}")


def marks_of(transport: str, *, slow: bool = False) -> list[pytest.MarkDecorator]:
    """Of a test over this transport: skipped where its package is missing, left out of fast runs if slow."""
    return [NEEDS_NIXL] * transport.startswith("nixl") + [pytest.mark.slow] * slow


def over(fast: Iterable[str], slow: Iterable[str] = ()) -> list[ParameterSet]:
    """Transports as parameters."""
    return [
        *(pytest.param(name, marks=marks_of(name)) for name in fast),
        *(pytest.param(name, marks=marks_of(name, slow=True)) for name in slow),
    ]

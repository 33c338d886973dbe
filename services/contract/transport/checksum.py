"""The checksum of a frame: XXH3, 64 bits, over the header and then the body.

Knows buffers only. xxhash is imported when the first transport is made, so that a service without a data
plane does without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from services.contract.errors import SetupError

Checksum: TypeAlias = Callable[[memoryview, memoryview], int]
"""(header, body), each contiguous, to 64 bits."""


def load_checksum() -> Checksum:
    """The checksum's function.

    Raises:
        SetupError: xxhash is not installed.
    """
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError as error:
        raise SetupError(
            "the data plane needs xxhash, which is not installed; pip install 'hotset[ucx]'"
        ) from error

    def checksum(header: memoryview, body: memoryview) -> int:
        return xxh3_64_intdigest(body, seed=xxh3_64_intdigest(header))

    return checksum

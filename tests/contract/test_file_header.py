from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contract.errors import InvalidRequest, SetupError
from services.contract.file_header import (
    FileHeader,
    HeaderCounters,
    blank_file_header,
    read_file_header,
    write_file_header,
)
from services.contract.layout import FILE_HEADER_BYTES, LAYOUT_VERSION
from services.contract.page_header import PAGE_HEADER
from services.contract.planes import Plane, PlaneLayer
from tests.contract.geometries import planes

HEADER = FileHeader(64, bytes(range(32)), (Plane("kv", (PlaneLayer(1, 4, 512),) * 30),))


def blank() -> memoryview:
    return memoryview(bytearray(FILE_HEADER_BYTES))


class TornBuffer:
    """Passes the first `left` writes on to `buffer` and loses the rest, as a killed process would."""

    def __init__(self, buffer: memoryview, left: int) -> None:
        self.buffer = buffer
        self.left = left

    def __setitem__(self, where: slice, what: bytes) -> None:
        if self.left > 0:
            self.buffer[where] = what
        self.left -= 1


@given(planes(), st.integers(64, 4096), st.binary(min_size=32, max_size=32))
def test_what_is_written_is_read(shape: tuple[Plane, ...], page_tokens: int, fingerprint: bytes) -> None:
    buffer = blank()
    header = FileHeader(page_tokens, fingerprint, shape)
    write_file_header(buffer, header)
    assert read_file_header(buffer) == header


def test_a_new_file_is_blank() -> None:
    assert read_file_header(blank()) is None


@pytest.mark.parametrize("writes", range(5))
def test_a_torn_write_is_blank_or_whole(writes: int) -> None:
    buffer = blank()
    write_file_header(buffer, HEADER)
    newer = FileHeader(128, bytes(32), HEADER.planes)
    write_file_header(TornBuffer(buffer, writes), newer)  # type: ignore[arg-type]  # a fault no real buffer makes
    assert read_file_header(buffer) == {0: HEADER, 4: newer}.get(writes)


def test_counters_outlive_a_new_header() -> None:
    buffer = blank()
    counters = HeaderCounters(buffer)
    counters.generation_floor, counters.epoch = 7, 2**32 - 1
    write_file_header(buffer, HEADER)
    blank_file_header(buffer)
    assert read_file_header(buffer) is None
    write_file_header(buffer, FileHeader(128, bytes(32), HEADER.planes))
    assert (counters.generation_floor, counters.epoch) == (7, 2**32 - 1)


def test_another_version_is_refused() -> None:
    buffer = blank()
    write_file_header(buffer, HEADER)
    buffer[8] = LAYOUT_VERSION + 1
    with pytest.raises(SetupError, match=f"layout version {LAYOUT_VERSION + 1}, this program reads"):
        read_file_header(buffer)


def test_another_magic_is_refused() -> None:
    buffer = blank()
    buffer[:8] = b"\x7fELF\2\1\1\0"
    with pytest.raises(SetupError, match="not hotset's"):
        read_file_header(buffer)


@pytest.mark.parametrize("offset", [12, 14, 16, 64, 90])
def test_damage_is_refused(offset: int) -> None:
    buffer = blank()
    write_file_header(buffer, HEADER)
    buffer[offset] ^= 0xFF
    with pytest.raises(SetupError, match="damaged"):
        read_file_header(buffer)


def test_a_short_file_is_refused() -> None:
    with pytest.raises(SetupError, match="less than its header"):
        read_file_header(memoryview(b"HOTSETAR"))


def test_a_description_that_does_not_fit_changes_nothing() -> None:
    buffer = blank()
    write_file_header(buffer, HEADER)
    # Every layer differs from the one before, so nothing can be run-length encoded.
    wild = tuple(PlaneLayer(1, 1 + number % 2, 16) for number in range(8000))
    with pytest.raises(InvalidRequest, match="has room for"):
        write_file_header(buffer, FileHeader(64, bytes(32), (Plane("kv", wild),)))
    assert read_file_header(buffer) == HEADER


def test_page_headers_are_words_that_do_not_overlap() -> None:
    fields = sorted((offset, kind.itemsize) for kind, offset, *_ in (PAGE_HEADER.fields or {}).values())
    assert all(start + size <= after for (start, size), (after, _) in pairwise(fields))
    assert fields[-1][0] + fields[-1][1] <= PAGE_HEADER.itemsize == 128
    assert all(offset % min(size, 8) == 0 for offset, size in fields)

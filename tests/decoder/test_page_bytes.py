"""Which bytes a run of tokens is: checked against the order that docs/records.md draws, byte by byte."""

from __future__ import annotations

import pytest

from services.decoder.kv.page_bytes import Piece, cut_at_edges, page_pieces
from tests.decoder import made_up

RECORD = {1: 192, 3: 64}  # bytes, by groups


def expected(groups: int, pages: list[int], first: int, tokens: int) -> dict[int, int]:
    """Byte in the arena -> byte among the pages side by side."""
    shape, found = made_up.shape(groups), {}
    for token in range(first, first + tokens):
        page, offset = divmod(token, 12)
        for group in range(groups):
            at, packed = (((p * groups + group) * 12 + offset) * RECORD[groups] for p in (pages[page], page))
            found.update({at + i: packed + i for i in range(RECORD[groups])})
    assert shape.page_elements * 4 == groups * 12 * RECORD[groups]
    return found


def spread(pieces: list[Piece]) -> dict[int, int]:
    found: dict[int, int] = {}
    for arena, packed, size in pieces:
        assert size > 0
        more = {arena + i: packed + i for i in range(size)}
        assert not found.keys() & more.keys()
        found |= more
    return found


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    ("pages", "first", "tokens"),
    [
        ([5], 0, 12),
        ([5], 4, 3),
        ([5], 0, 1),
        ([5, 2], 11, 2),
        ([2, 3, 4], 0, 36),
        ([2, 3, 7, 8, 1], 8, 45),
        ([4, 3, 2], 4, 32),
    ],
)
def test_pieces_are_the_runs_bytes(groups: int, pages: list[int], first: int, tokens: int) -> None:
    pieces = page_pieces(made_up.shape(groups), pages, first, tokens)
    assert spread(pieces) == expected(groups, pages, first, tokens)
    for offset, edge in ((0, 1 << 30), (4096, 1000), (100, 64)):
        cut = list(cut_at_edges(pieces, offset, edge))
        assert spread(cut) == spread(pieces)
        for arena, _, size in cut:
            assert (offset + arena) // edge == (offset + arena + size - 1) // edge


def test_neighbouring_pages_are_one_piece() -> None:
    pieces = page_pieces(made_up.shape(3), [7, 8, 9, 2, 3], 0, 60)
    assert [piece.size // (12 * 3 * 64) for piece in pieces] == [3, 2]

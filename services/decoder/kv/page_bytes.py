"""Which bytes of the arena are a run of tokens in one layer, as few pieces as they can be copied in.

Knows the order of docs/records.md; computes numbers, copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from services.decoder.kv.shape import KvShape


class Piece(NamedTuple):
    """Bytes that lie side by side on both sides."""

    arena: int  # offset in the layer's pages
    packed: int  # offset in the run's pages, when these lie side by side
    size: int


def page_pieces(shape: KvShape, pages: Sequence[int], first: int, tokens: int) -> list[Piece]:
    """The pieces of a run of tokens.

    Args:
        shape: the model's sizes.
        pages: in token order, those that the run touches.
        first: where the run begins in the first page, tokens.
        tokens: of the run.
    """
    record = shape.record_elements * shape.record_dtype.itemsize
    page_bytes, of_group = shape.page_elements * shape.record_dtype.itemsize, shape.page_tokens * record
    pieces: list[Piece] = []
    for number, page in enumerate(pages):
        begin = max(0, first - number * shape.page_tokens)
        end = min(shape.page_tokens, first + tokens - number * shape.page_tokens)
        arena, packed = page * page_bytes, number * page_bytes
        if (begin, end) != (0, shape.page_tokens):
            for group in range(shape.groups):
                at = group * of_group + begin * record
                pieces.append(Piece(arena + at, packed + at, (end - begin) * record))
        elif pieces and pieces[-1].arena + pieces[-1].size == arena and number * page_bytes == _end(pieces):
            pieces[-1] = pieces[-1]._replace(size=pieces[-1].size + page_bytes)
        else:
            pieces.append(Piece(arena, packed, page_bytes))
    return pieces


def _end(pieces: list[Piece]) -> int:
    return pieces[-1].packed + pieces[-1].size


def cut_at_edges(pieces: Iterable[Piece], offset: int, edge: int) -> Iterator[Piece]:
    """The same bytes, no piece reaching over a multiple of `edge`; the layer's pages begin at `offset`."""
    for arena, packed, size in pieces:
        done = 0
        while done < size:
            room = edge - (offset + arena + done) % edge
            part = min(size - done, room)
            yield Piece(arena + done, packed + done, part)
            done += part

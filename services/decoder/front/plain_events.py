"""Events that differ in their text alone: most of a stream. Knows no field of theirs.

A chunk of a choice is made and serialised once, around a text that stands in no other place of it; later ones
put theirs there. That is a thirtieth of the work, and the same bytes, because the same library escapes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import Protocol

from pydantic import BaseModel
from pydantic_core import to_json

from services.decoder.front.answer import ChoicePiece
from services.decoder.front.choice_text import Piece


class Chunks(Protocol):
    """What makes chunks."""

    def chunks(self, piece: ChoicePiece) -> Iterable[BaseModel]:
        """Chunks that tell `piece`: one, of a piece that has text alone."""


class PlainEvents:
    """Of one answer's stream."""

    def __init__(self, shape: Chunks, told: Callable[[BaseModel], bytes]) -> None:
        """`told` makes an event of a chunk that `shape` makes, the same bytes of equal ones."""
        self._shape = shape
        self._told = told
        self._text = secrets.token_hex(16)
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def event(self, index: int, text: str) -> bytes:
        """Of choice `index`, with this text."""
        around = self._around.get(index)
        if around is None:
            (chunk,) = self._shape.chunks(ChoicePiece(index, Piece(self._text)))
            before, after = self._told(chunk).split(to_json(self._text))
            around = self._around[index] = before, after
        return around[0] + to_json(text) + around[1]

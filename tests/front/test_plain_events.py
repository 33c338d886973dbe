"""Events around a text are those that a whole chunk would have made, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel

from services.decoder.front import sse
from services.decoder.front.answer import ChoicePiece
from services.decoder.front.chat_shape import ChatShape
from services.decoder.front.choice_text import Piece
from services.decoder.front.completion_shape import CompletionShape
from services.decoder.front.plain_events import PlainEvents
from services.decoder.front.text.tokenizer import TextTokenizer

TEXTS = (
    *("x", " Paris", '"', "\\", '\\"', "\n\r\t\0\x1f\x7f", "</script>", "\u2028\u2029", "\ufffd", "é漢🙂"),
    *('"finish_reason":null', "data: [DONE]\n\n", " " * 5000),
)
Told = Callable[[BaseModel], bytes]


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> TextTokenizer:
    return TextTokenizer.from_directory(default_model)


def chat(tokenizer: TextTokenizer, top: int | None = None) -> ChatShape:
    return ChatShape("chatcmpl-1", 1700000000, 'na"me', "fp_1", tokenizer, 3, top)


def completion(tokenizer: TextTokenizer, top: int | None = None) -> CompletionShape:
    return CompletionShape(
        answer_id="cmpl-1",
        created=1700000000,
        model="name",
        fingerprint="fp_1",
        tokenizer=tokenizer,
        n=3,
        top_logprobs=top,
        echoed=["A prompt"],
    )


def without_usage(chunk: BaseModel) -> bytes:
    return sse.event(chunk.model_dump_json(exclude={"usage"}))


def with_null(chunk: BaseModel) -> bytes:
    return sse.event(chunk.model_dump_json())


@pytest.mark.parametrize("told", [without_usage, with_null])
@pytest.mark.parametrize("make", [chat, completion])
def test_the_bytes_are_those_of_whole_chunks(
    make: Callable[[TextTokenizer], ChatShape | CompletionShape], told: Told, tokenizer: TextTokenizer
) -> None:
    shape, other = make(tokenizer), make(tokenizer)
    plain = PlainEvents(shape, told)
    for index in (0, 2, 1):
        for one in (shape, other):
            assert [*one.chunks(ChoicePiece(index, Piece("first")))]
    for text in TEXTS:
        for index in (0, 1, 2):
            piece = ChoicePiece(index, Piece(text))
            assert shape.plain_text(piece) == text
            (chunk,) = other.chunks(piece)
            assert plain.event(index, text) == told(chunk)


@pytest.mark.parametrize("make", [chat, completion])
def test_what_tells_more_than_text_is_not_plain(
    make: Callable[..., ChatShape | CompletionShape], tokenizer: TextTokenizer
) -> None:
    shape = make(tokenizer)
    assert [*shape.chunks(ChoicePiece(0, Piece("first")))]
    assert shape.plain_text(ChoicePiece(0, Piece(""))) is None
    assert shape.plain_text(ChoicePiece(0, Piece("last"), finish="stop")) is None
    scored = make(tokenizer, 0)
    assert [*scored.chunks(ChoicePiece(0, Piece("first")))]
    assert scored.plain_text(ChoicePiece(0, Piece("text"))) is None


def test_a_completion_begins_with_its_prompt(tokenizer: TextTokenizer) -> None:
    shape = completion(tokenizer)
    assert shape.plain_text(ChoicePiece(0, Piece("first"))) is None
    assert [*shape.chunks(ChoicePiece(0, Piece("first")))]
    assert shape.plain_text(ChoicePiece(0, Piece("second"))) == "second"
    assert shape.plain_text(ChoicePiece(1, Piece("first"))) is None

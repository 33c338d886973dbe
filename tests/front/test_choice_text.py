"""Any answer, cut into any tokens and events, with any stop texts: the pieces together are the answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hotset.v1 import engine_pb2
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.decoder.front.choice_text import ChoiceText, Piece
from services.decoder.front.text.tokenizer import TextTokenizer

TEXT = st.text("ab€🙂é. ", max_size=30)
STOPS = st.lists(st.text("ab€🙂é. ", min_size=1, max_size=4), max_size=3)


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> TextTokenizer:
    return TextTokenizer.from_directory(default_model)


@pytest.fixture(scope="module")
def byte_tokens(tokenizer: TextTokenizer) -> dict[bytes, int]:
    by_bytes = {tokenizer.bytes_of(token): token for token in range(tokenizer.vocab_size)}
    return {piece: token for piece, token in by_bytes.items() if len(piece) == 1}


def _expected(text: str, stops: Sequence[str], *, keep: bool) -> str:
    """The first stop text to be completed wins; of those completed together, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[:end] if keep else text[: end - len(max(found, key=len))]
    return text


def _run(choice: ChoiceText, ids: Sequence[int], cuts: Sequence[int]) -> list[Piece]:
    """Feed the ids, an event up to each cut; the last event ends the answer."""
    edges = sorted({min(cut, len(ids)) for cut in cuts} - {0, len(ids)})
    pieces = []
    for start, end in zip([0, *edges], [*edges, len(ids)], strict=True):
        tokens = [engine_pb2.Token(id=token) for token in ids[start:end]]
        pieces.append(choice.feed(tokens, last_is_end=False, ended=end == len(ids)))
        if pieces[-1].stopped:
            break
    return pieces


@settings(max_examples=300, deadline=None)
@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 60)), keep=st.booleans(), split=st.booleans())
@example(text="a€", stops=["€"], cuts=[2, 3], keep=False, split=True)
@example(text="", stops=[], cuts=[], keep=False, split=False)
def test_pieces_are_the_answer(
    tokenizer: TextTokenizer,
    byte_tokens: dict[bytes, int],
    text: str,
    stops: list[str],
    cuts: list[int],
    keep: bool,
    split: bool,
) -> None:
    if split:
        ids = [byte_tokens[bytes([byte])] for byte in text.encode()]
    else:
        ids = tokenizer.encode(text, add_special_tokens=False)
    choice = ChoiceText(
        tokenizer, stop_texts=stops, keep_stop_text=keep, min_tokens=0, continues=False, tells_tokens=True
    )
    pieces = _run(choice, ids, cuts)
    shown = "".join(piece.text for piece in pieces)
    want = _expected(text, stops, keep=keep)
    assert shown == want
    assert any(piece.stopped for piece in pieces) == (
        want != text or any(want.endswith(stop) for stop in stops)
    )
    told = [token for piece in pieces for token in piece.tokens]
    spelled = b"".join(tokenizer.bytes_of(token.token.id) for token in told)
    if split:
        assert spelled == shown.encode()
    else:  # a stop text may cut the last token, and no other
        without_last = b"".join(tokenizer.bytes_of(token.token.id) for token in told[:-1])
        assert spelled.startswith(shown.encode())
        assert len(without_last) < len(shown.encode()) or not shown
    assert [token.token.id for token in told] == ids[: len(told)]
    assert all(len(text.encode()) >= token.offset for token in told)
    assert [token.offset for token in told] == sorted(token.offset for token in told)


def test_an_end_token_has_no_text(tokenizer: TextTokenizer) -> None:
    choice = ChoiceText(
        tokenizer, stop_texts=(), keep_stop_text=False, min_tokens=0, continues=False, tells_tokens=True
    )
    (word,) = tokenizer.encode("Hello", add_special_tokens=False)
    tokens = [engine_pb2.Token(id=token) for token in (word, word)]
    piece = choice.feed(tokens, last_is_end=True, ended=True)
    assert (piece.text, len(piece.tokens), choice.tokens) == ("Hello", 1, 2)

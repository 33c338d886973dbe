"""Text from tokens as they come equals decoding at the end, and never shows half a character."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.decoder.front.text.detokenizer import Detokenizer
from services.decoder.front.text.tokenizer import TextTokenizer

UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
CUTS = st.lists(st.integers(1, 4), min_size=1, max_size=8)


def in_pieces(detokenizer: Detokenizer, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    pieces, position, turn = [], 0, 0
    while position < len(ids):
        width = cuts[turn % len(cuts)]
        pieces.append(detokenizer.feed(ids[position : position + width]))
        position, turn = position + width, turn + 1
    return pieces


@settings(max_examples=150, deadline=None)
@given(texts=st.lists(UNICODE, max_size=3), cuts=CUTS, skip=st.booleans())
def test_equals_decoding_at_the_end(
    tokenizer: TextTokenizer, texts: list[str], cuts: list[int], skip: bool
) -> None:
    ids = [number for text in texts for number in [*tokenizer.encode(text), *sorted(tokenizer.eos_ids)]]
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    pieces = in_pieces(detokenizer, ids, cuts)
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces) + detokenizer.flush() == expected
    if "\ufffd" not in expected:
        assert all("\ufffd" not in piece for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 300), max_size=30), cuts=CUTS, skip=st.booleans())
def test_any_bytes_equal_decoding_at_the_end(
    smollm: TextTokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    """Ids below 300 are single bytes mostly, so most of these are not UTF-8."""
    detokenizer = smollm.detokenizer(skip_special_tokens=skip)
    pieces = in_pieces(detokenizer, ids, cuts)
    assert "".join(pieces) + detokenizer.flush() == smollm.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 2), st.integers(259, 10**4)), max_size=20), cuts=CUTS)
def test_any_pieces_equal_decoding_at_the_end(llama2: TextTokenizer, ids: list[int], cuts: list[int]) -> None:
    """Tokens of Llama 2's kind in any order, bytes left out; ids that do not exist among them."""
    detokenizer = llama2.detokenizer()
    assert "".join(in_pieces(detokenizer, ids, cuts)) + detokenizer.flush() == llama2.decode(ids)


@settings(max_examples=100, deadline=None)
@given(prompt=UNICODE.filter(bool), answer=UNICODE)
def test_a_continuation_joins_its_prompt(tokenizer: TextTokenizer, prompt: str, answer: str) -> None:
    """Wherever the ids are cut between two characters, both halves make up the whole."""
    ids = tokenizer.encode(prompt + answer)
    whole = tokenizer.decode(ids)
    for cut in range(1, len(ids)):
        start = tokenizer.detokenizer()
        shown = start.feed(ids[:cut])
        if start.flush() or not shown:
            continue  # inside a character, or nothing to go on from
        rest = tokenizer.detokenizer(continues=True)
        assert shown + rest.feed(ids[cut:]) + rest.flush() == whole


def test_added_tokens(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode("a<tool> b<〈tool▁call〉>語<〈tool▁call〉>")
    detokenizer = tokenizer.detokenizer()
    text = "".join(detokenizer.feed([number]) for number in ids) + detokenizer.flush()
    assert text == tokenizer.decode(ids)


def test_leading_space(llama2: TextTokenizer) -> None:
    ids = llama2.encode("Paris is", add_special_tokens=False)
    assert llama2.detokenizer().feed(ids) == "Paris is"
    assert llama2.detokenizer(continues=True).feed(ids) == " Paris is"
    one_by_one = llama2.detokenizer()
    assert "".join(one_by_one.feed([number]) for number in [1, *ids]) == "Paris is"


def test_characters_split_over_tokens(smollm: TextTokenizer, llama2: TextTokenizer) -> None:
    for tokenizer, text in ((smollm, "語"), (llama2, "語"), (smollm, "👩‍👩‍👧"), (llama2, "🇫🇷")):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) > len(text)
        detokenizer = tokenizer.detokenizer()
        pieces = [detokenizer.feed([number]) for number in ids]
        assert "".join(pieces) == text
        assert "" in pieces
        assert detokenizer.flush() == ""


def test_a_dangling_half(smollm: TextTokenizer, llama2: TextTokenizer) -> None:
    for tokenizer in (smollm, llama2):
        detokenizer = tokenizer.detokenizer()
        ids = tokenizer.encode("語", add_special_tokens=False)
        assert detokenizer.feed(ids[:-1]).strip() == ""
        assert detokenizer.flush() == "\ufffd"
        assert detokenizer.flush() == ""


def test_byte_tokens_that_are_not_utf8(llama2: TextTokenizer) -> None:
    """The one difference from decode, which replaces the good character of the run as well."""
    ids = [3 + byte for byte in "é".encode() + b"\xff"]
    assert llama2.decode(ids) == "\ufffd" * 3
    detokenizer = llama2.detokenizer()
    assert [detokenizer.feed([number]) for number in ids] == ["", "é", "\ufffd"]


def test_special_tokens_inside_a_character(smollm: TextTokenizer) -> None:
    ids = smollm.encode("🙂")
    broken = [ids[0], 2, *ids[1:]]
    for skip in (True, False):
        detokenizer = smollm.detokenizer(skip_special_tokens=skip)
        text = "".join(detokenizer.feed([number]) for number in broken) + detokenizer.flush()
        assert text == smollm.decode(broken, skip_special_tokens=skip)


def test_ids_that_no_token_has(smollm: TextTokenizer) -> None:
    assert smollm.detokenizer().feed([49152, 10**6]) == ""


@pytest.mark.parametrize("text", [" world", "\ufffd", "語"])
def test_cost_does_not_grow_with_the_answer(smollm: TextTokenizer, text: str) -> None:
    ids = smollm.encode(text)[:1] * 20_000
    detokenizer = smollm.detokenizer()
    start = time.perf_counter()
    for number in ids:
        detokenizer.feed([number])
    assert time.perf_counter() - start < 2  # 0.05 s measured; held-back text decoded anew takes minutes

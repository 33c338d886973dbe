"""Stop strings against a plain search of the whole text, wherever the text is cut."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.decoder.front.text.stop import StopMatcher

FEW_LETTERS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def oracle(text: str, stops: list[str], include: bool, spared: int) -> tuple[str, str | None]:
    """What is shown of `text`, and the stop string, read off the text a character at a time.

    Those completed by the first `spared` characters count for nothing.
    """
    for end in range(spared + 1, len(text) + 1):
        endings = [stop for stop in stops if text[:end].endswith(stop)]
        if endings:
            stop = max(endings, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=1000)
@given(text=FEW_LETTERS, stops=STOPS, include=st.booleans(), spared=st.integers(0, 8), data=st.data())
def test_against_the_oracle(
    text: str, stops: list[str], include: bool, spared: int, data: st.DataObject
) -> None:
    matcher = StopMatcher(stops, include_stop=include)
    shown, position, stopped = "", 0, False
    while position < len(text) and not stopped:
        width = data.draw(st.integers(1, 6))
        if position < spared:
            width = min(width, spared - position)
        piece, stopped = matcher.feed(text[position : position + width], may_stop=position >= spared)
        shown, position = shown + piece, position + width
        assert matcher.offset == len(shown)
        if not stopped:  # nothing safe is kept, nothing unsafe is shown
            seen = text[:position]
            held = seen.removeprefix(shown)
            longest = max(
                (n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0
            )
            assert held == seen[len(seen) - longest :]
    shown += matcher.flush()
    assert (shown, matcher.stop) == oracle(text, stops, include, spared)
    assert stopped == (matcher.stop is not None)


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "stop"),
    [
        (["Hello", " wor", "ld"], [" world"], "Hello", " world"),
        (["a\n", "\nb"], ["\n\n"], "a", "\n\n"),
        (["abc"], ["bc", "abcd"], "a", "bc"),  # completed first, though the other began first
        (["abc"], ["c", "bc", "abc"], "", "abc"),  # completed together: the longest
        (["STOPSTOP"], ["STOP"], "", "STOP"),
        (["xx</", "s", "x</s>y"], ["</s>"], "xx</sx", "</s>"),
        (["日本", "語"], ["本語"], "日", "本語"),
        (["👩\u200d", "👧"], ["\u200d👧"], "👩", "\u200d👧"),
        (["", "", ""], ["x"], "", None),
        (["abc"], [], "abc", None),
    ],
)
def test_cases(pieces: list[str], stops: list[str], shown: str, stop: str | None) -> None:
    matcher = StopMatcher(stops)
    text = "".join(matcher.feed(piece)[0] for piece in pieces) + matcher.flush()
    assert (text, matcher.stop) == (shown, stop)


def test_nothing_comes_after_a_stop() -> None:
    matcher = StopMatcher(["."])
    assert matcher.feed("a.b") == ("a", True)
    assert matcher.feed("c") == ("", True)
    assert matcher.flush() == ""
    assert matcher.offset == 1


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_long_stop_strings_do_not_slow_it() -> None:
    matcher = StopMatcher(["a" * 10_000 + "b"] * 4)
    start = time.perf_counter()
    for _ in range(20_000):
        matcher.feed("a")
    assert time.perf_counter() - start < 20
    assert matcher.offset == 10_000

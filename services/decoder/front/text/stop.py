"""Stop strings in text that arrives in pieces: what may be shown, and when to stop.

Knows text only; tokens, end tokens and lengths are others' affair. Where the pieces are cut makes no
difference: the stop string that is completed first wins, of several completed by the same character the
longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """The stop strings of one answer. Cost per character does not grow with the text or the strings."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """Begin an answer.

        Args:
            stops: strings to stop at; none = the text passes through.
            include_stop: whether the stop string itself is shown.

        Raises:
            ValueError: an empty stop string.
        """
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop that the text now ends with
        self._include_stop = include_stop
        self._held = ""
        self.stop: str | None = None
        """The stop string that was found."""
        self.offset = 0
        """Characters passed on so far."""

    def feed(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """What may be shown now, and whether a stop string was found.

        The longest end of the text that may yet become a stop string is held back. After a stop, nothing
        more comes. Where it may not stop, a stop string that `text` completes counts for nothing; one that
        begins in it may be found later.
        """
        if self.stop is not None:
            return "", True
        if not self._stops:
            return self._pass_on(text), False
        buffer = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            found = self._step(character)
            if found is not None and may_stop:
                self.stop = found
                self._held = ""
                return self._pass_on(
                    buffer[: position if self._include_stop else position - len(found)]
                ), True
        safe = len(buffer) - max(self._matched)
        self._held = buffer[safe:]
        return self._pass_on(buffer[:safe]), False

    def flush(self) -> str:
        """What was held back, at the end of an answer that did not stop."""
        held, self._held = self._held, ""
        return self._pass_on(held)

    def _step(self, character: str) -> str | None:
        """Take in one character; the longest stop string that it completes."""
        found: str | None = None
        for number, stop in enumerate(self._stops):
            matched = self._matched[number]
            while matched and stop[matched] != character:
                matched = self._fallbacks[number][matched]
            matched += stop[matched] == character
            self._matched[number] = matched
            if matched == len(stop):
                self._matched[number] = self._fallbacks[number][
                    matched
                ]  # one that counts for nothing goes on
                found = stop if found is None else max(found, stop, key=len)
        return found

    def _pass_on(self, text: str) -> str:
        self.offset += len(text)
        return text


def _fallbacks(stop: str) -> list[int]:
    """For each n, how long a proper prefix of `stop` its first n characters end with (Knuth-Morris-Pratt)."""
    lengths = [0, 0]
    matched = 0
    for character in stop[1:]:
        while matched and stop[matched] != character:
            matched = lengths[matched]
        matched += stop[matched] == character
        lengths.append(matched)
    return lengths

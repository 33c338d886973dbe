"""The text of one choice as its tokens come: decoded, cut at stop strings, aligned with log probabilities.

Knows one choice's tokens; nothing of engines, JSON or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hotset.v1 import engine_pb2

from services.decoder.front.text.stop import StopMatcher
from services.decoder.front.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token whose text was passed on.

    Attributes:
        token: as the engine told it.
        offset: characters of the answer before it.
    """

    token: engine_pb2.Token
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event adds to the answer. Together, the tokens of all pieces spell the text of all pieces."""

    text: str = ""
    tokens: Sequence[ShownToken] = field(default=())
    stopped: bool = False  # a stop string was found; nothing more comes


@dataclass(slots=True)
class _Held:
    token: engine_pb2.Token
    start: int  # characters decoded before it
    end: int | None  # characters decoded with it; None while it is part of an unfinished character


class ChoiceText:
    """One choice's text.

    A token is passed on with the piece that completes its text, never before: tokens that turn out to be
    (part of) a stop string are not reported, so that log probabilities and text say the same.

    Attributes:
        tokens: taken in so far, those that are never shown included.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        stop_texts: Sequence[str],
        keep_stop_text: bool,
        min_tokens: int,
        continues: bool,
        tells_tokens: bool,
    ) -> None:
        """Begin an answer.

        Args:
            tokenizer: of the checkpoint.
            stop_texts: texts to stop at; those completed before token `min_tokens` do not count.
            keep_stop_text: whether the stop text is passed on.
            min_tokens: tokens before stop texts are looked for.
            continues: whether the text goes on from a prompt's.
            tells_tokens: whether pieces say which tokens they are of; nobody asks where no log probabilities
                are told.
        """
        self.tokens = 0
        self._detokenizer = tokenizer.detokenizer(continues=continues)
        self._matcher = StopMatcher(stop_texts, include_stop=keep_stop_text)
        self._min_tokens = min_tokens
        self._tells_tokens = tells_tokens
        self._held: list[_Held] = []
        self._decoded = 0  # characters
        self._shown = 0  # characters

    def feed(self, tokens: Sequence[engine_pb2.Token], *, last_is_end: bool, ended: bool) -> Piece:
        """Take in one event's tokens.

        Args:
            tokens: in order.
            last_is_end: the last one ended the answer (a stop token); it has no text.
            ended: no more tokens come; what was held back is passed on.
        """
        text, stopped = "", False
        for place, token in enumerate(tokens, start=1):
            self.tokens += 1
            if last_is_end and place == len(tokens):
                break
            new = self._detokenizer.feed((token.id,))
            if self._tells_tokens:
                self._hold(token, len(new))
            shown, stopped = self._match(new)
            text += shown
            if stopped:
                break
        if ended and not stopped:
            rest = self._detokenizer.flush()
            self._decoded += len(rest)
            shown, stopped = self._match(rest)
            text += shown if stopped else shown + self._matcher.flush()
        self._shown += len(text)
        return Piece(text, self._release(everything=ended and not stopped, stopped=stopped), stopped)

    def _match(self, text: str) -> tuple[str, bool]:
        return self._matcher.feed(text, may_stop=self.tokens >= self._min_tokens)

    def _hold(self, token: engine_pb2.Token, new_characters: int) -> None:
        if new_characters:
            for earlier in self._held:
                if earlier.end is None:
                    earlier.end = self._decoded + 1  # part of the character that this token completes
        held = _Held(token, self._decoded, self._decoded + new_characters if new_characters else None)
        self._decoded += new_characters
        self._held.append(held)

    def _release(self, *, everything: bool, stopped: bool) -> list[ShownToken]:
        ready = 0
        for held in self._held:
            # At a stop text, a token that is only partly cut off still belongs to the answer.
            whole = held.start < self._shown if stopped else held.end is not None and held.end <= self._shown
            if not (everything or whole):
                break
            ready += 1
        released, self._held = self._held[:ready], self._held[ready:]
        return [ShownToken(held.token, held.start) for held in released]

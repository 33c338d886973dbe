"""How /v1/chat/completions tells an answer: chat.completion and its chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.decoder.front.answer import ChoicePiece, Finish
from services.decoder.front.choice_text import ShownToken
from services.decoder.front.logprobs import chat_logprobs
from services.decoder.front.responder import WholeChoice
from services.decoder.front.schema.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Usage,
)
from services.decoder.front.text.tokenizer import TextTokenizer


@dataclass(frozen=True)
class ChatShape:
    """A Shape (responder.py).

    Attributes:
        n: choices.
        top_logprobs: alternatives told of each token; None = no log probabilities.
    """

    answer_id: str
    created: int
    model: str
    fingerprint: str
    tokenizer: TextTokenizer
    n: int
    top_logprobs: int | None

    def opening(self) -> Iterable[ChatChunk]:
        """Each choice's role."""
        for index in range(self.n):
            yield self._chunk(index, ChatDelta(role="assistant", content=""))

    def chunks(self, piece: ChoicePiece) -> Iterable[ChatChunk]:
        """Its text, if there is any; its end, in a chunk of its own."""
        text, tokens = piece.piece.text, piece.piece.tokens
        if text or (tokens and self.top_logprobs is not None):
            yield self._chunk(piece.index, ChatDelta(content=text), self._logprobs(tokens))
        if piece.finish is not None:
            yield self._chunk(piece.index, ChatDelta(), finish=piece.finish)

    def plain_text(self, piece: ChoicePiece) -> str | None:
        """Unless it ends the choice, or log probabilities are told."""
        return None if piece.finish or self.top_logprobs is not None else piece.piece.text or None

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        """No choices, token counts."""
        return self._made([], usage)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> ChatCompletion:
        """Everything in one."""
        return ChatCompletion(
            id=self.answer_id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=[
                ChatChoice(
                    index=index,
                    message=ChatMessage(content=choice.text),
                    logprobs=self._logprobs(choice.tokens),
                    finish_reason=choice.finish,
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage,
        )

    def _logprobs(self, tokens: Sequence[ShownToken]) -> ChatLogprobs | None:
        return None if self.top_logprobs is None else chat_logprobs(self.tokenizer, tokens, self.top_logprobs)

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        logprobs: ChatLogprobs | None = None,
        finish: Finish | None = None,
    ) -> ChatChunk:
        return self._made(
            [ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish)], None
        )

    def _made(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatChunk:
        return ChatChunk(
            id=self.answer_id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=choices,
            usage=usage,
        )

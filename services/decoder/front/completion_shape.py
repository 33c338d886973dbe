"""How /v1/completions tells an answer: text_completion, whole and in chunks, its prompt echoed on request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hotset.v1 import engine_pb2

from services.decoder.front.answer import ChoicePiece, Finish
from services.decoder.front.choice_text import ShownToken
from services.decoder.front.logprobs import completion_logprobs
from services.decoder.front.responder import WholeChoice
from services.decoder.front.schema.answers import Completion, CompletionChoice, CompletionLogprobs, Usage
from services.decoder.front.text.tokenizer import TextTokenizer


class CompletionShape:
    """A Shape (responder.py). Remembers which choices' prompts were told."""

    def __init__(
        self,
        *,
        answer_id: str,
        created: int,
        model: str,
        fingerprint: str,
        tokenizer: TextTokenizer,
        n: int,
        top_logprobs: int | None,
        echoed: Sequence[str] | None,
    ) -> None:
        """Arguments.

        Args:
            answer_id: of the answer.
            created: Unix seconds.
            model: its name.
            fingerprint: of the server.
            tokenizer: of the checkpoint.
            n: choices of each prompt.
            top_logprobs: alternatives told of each token; None = no log probabilities.
            echoed: each prompt's text, if answers begin with it.
        """
        self._answer_id = answer_id
        self._created = created
        self._model = model
        self._fingerprint = fingerprint
        self._tokenizer = tokenizer
        self._n = n
        self._top = top_logprobs
        self._echoed = echoed
        self._begun: set[int] = set()

    def opening(self) -> Iterable[Completion]:
        """Nothing: a completion has no role."""
        return ()

    def chunks(self, piece: ChoicePiece) -> Iterable[Completion]:
        """Its text, with the prompt's before it if it is the first, and its end."""
        first = piece.index not in self._begun
        self._begun.add(piece.index)
        choice = self._choice(
            piece.index, piece.piece.text, piece.piece.tokens, piece.prompt, piece.finish, begins=first
        )
        if choice.text or choice.finish_reason or (choice.logprobs and choice.logprobs.tokens):
            yield self._made([choice], None)

    def plain_text(self, piece: ChoicePiece) -> str | None:
        """Unless it begins or ends the choice, or log probabilities are told."""
        if piece.finish or self._top is not None or piece.index not in self._begun:
            return None
        return piece.piece.text or None

    def usage_chunk(self, usage: Usage) -> Completion:
        """No choices, token counts."""
        return self._made([], usage)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Completion:
        """Everything in one."""
        told = [
            self._choice(index, choice.text, choice.tokens, choice.prompt, choice.finish, begins=True)
            for index, choice in enumerate(choices)
        ]
        return self._made(told, usage)

    def _choice(
        self,
        index: int,
        text: str,
        tokens: Sequence[ShownToken],
        prompt: Sequence[engine_pb2.Token],
        finish: Finish | None,
        *,
        begins: bool,
    ) -> CompletionChoice:
        echo = "" if self._echoed is None else self._echoed[index // self._n]
        logprobs = None
        if self._top is not None:
            logprobs = completion_logprobs(self._tokenizer, tokens, self._top, base=len(echo))
            if begins and self._echoed is not None:
                spelled = _spelled(self._tokenizer, prompt, echo)
                logprobs = _joined(completion_logprobs(self._tokenizer, spelled, self._top, base=0), logprobs)
        return CompletionChoice(
            text=echo + text if begins else text, index=index, logprobs=logprobs, finish_reason=finish
        )

    def _made(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return Completion(
            id=self._answer_id,
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=usage,
        )


def _spelled(tokenizer: TextTokenizer, prompt: Sequence[engine_pb2.Token], text: str) -> list[ShownToken]:
    """Where each of the prompt's tokens begins in its text.

    What the tokenizer put around the text, a begin token for example, takes up none of it.
    """
    spelling = tokenizer.detokenizer(skip_special_tokens=False)
    offset, shown = 0, []
    for token in prompt:
        shown.append(ShownToken(token, offset))
        spelled = spelling.feed((token.id,))
        if token.id not in tokenizer.special_ids or text.startswith(spelled, offset):
            offset += len(spelled)
    return shown


def _joined(before: CompletionLogprobs, after: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=before.tokens + after.tokens,
        token_logprobs=before.token_logprobs + after.token_logprobs,
        top_logprobs=before.top_logprobs + after.top_logprobs,
        text_offset=before.text_offset + after.text_offset,
    )

"""One HTTP request's choices at the engine: submitted, read as they grow, ended whatever happens.

Knows events and text; nothing of HTTP, JSON or SSE. The order of business is `submit`, `pieces`, `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hotset.v1 import engine_pb2

from services.contract.errors import HotsetError, InvalidRequest, NoRoom, StateConflict
from services.decoder.front.choice_text import ChoiceText, Piece
from services.decoder.front.engine_client import EngineClient, EngineGone, Interrupted, Mailbox
from services.decoder.front.errors import (
    ApiError,
    BadRequest,
    EngineFault,
    EngineLost,
    InternalFault,
    Overloaded,
    ShuttingDown,
)
from services.decoder.front.request_metrics import ChoiceClock, Endpoint, Outcome, RequestMetrics
from services.decoder.front.sampling import Plan
from services.decoder.front.text.tokenizer import TextTokenizer

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class ChoicePiece:
    """The next part of one choice.

    Attributes:
        index: of the choice in the HTTP answer: prompts in order, n choices each.
        prompt: the prompt's tokens with log probabilities, if they were asked for; in its first piece only.
        finish: set in its last piece.
    """

    index: int
    piece: Piece
    prompt: Sequence[engine_pb2.Token] = ()
    finish: Finish | None = None


@dataclass(slots=True)
class Tally:
    """Tokens of one HTTP request so far."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finishes: list[str] = field(default_factory=list)
    first_token_seconds: float | None = None  # after the request came


@dataclass(slots=True)
class _Choice:
    index: int
    request_id: str
    number: int  # among the prompt's choices
    text: ChoiceText
    clock: ChoiceClock


class Answer:
    """All choices of one HTTP request. Whoever makes one calls `close`, which ends what still runs."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: TextTokenizer,
        metrics: RequestMetrics,
        *,
        endpoint: Endpoint,
        tally: Tally,
        began: float,
    ) -> None:
        """Arguments.

        Args:
            client: the engine that is to answer.
            tokenizer: of the checkpoint.
            metrics: told of every token and end.
            endpoint: a label of the metrics.
            tally: kept up to date.
            began: when the HTTP request came, monotonic seconds.
        """
        self.tally = tally
        self._client = client
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._endpoint: Endpoint = endpoint
        self._began = began
        self._mailbox: Mailbox = asyncio.Queue()
        self._open: dict[tuple[str, int], _Choice] = {}
        self._cached: dict[str, int] = {}

    def interrupt(self) -> None:
        """Make `pieces` raise ShuttingDown."""
        self._mailbox.put_nowait(Interrupted())

    def close(self, outcome: Outcome) -> None:
        """End whatever still runs at the engine, and book it as `outcome`; again: nothing."""
        for request_id in {choice.request_id for choice in self._open.values()}:
            self._client.forget(request_id)
            self._client.abort(request_id)
        for _ in self._open:
            self.tally.finishes.append(outcome)
            self._metrics.ended(self._endpoint, outcome)
        self._open.clear()

    async def submit(
        self, answer_id: str, prompts: Sequence[Sequence[int]], plan: Plan, *, limit: int, continues: bool
    ) -> None:
        """Hand every prompt to the engine, all or none.

        Args:
            answer_id: unique among all requests.
            prompts: token ids of each.
            plan: what they share.
            limit: longest prompt + answer, tokens.
            continues: whether answers go on from their prompts' text, as completions do.

        Raises:
            BadRequest: it does not fit the model.
            Overloaded: the engine's queue is full.
            EngineLost, ShuttingDown: the engine is gone, or takes nothing new.
        """
        submissions = [
            plan.submission(f"{answer_id}-{number}", tuple(prompt), limit)
            for number, prompt in enumerate(prompts)
        ]
        for number, submission in enumerate(submissions):
            for choice in range(plan.n):
                text = ChoiceText(
                    self._tokenizer,
                    stop_texts=plan.stop_texts,
                    keep_stop_text=plan.keep_stop_text,
                    min_tokens=plan.min_tokens,
                    continues=continues,
                )
                self._open[submission.request_id, choice] = _Choice(
                    number * plan.n + choice, submission.request_id, choice, text, ChoiceClock(self._began)
                )
            self.tally.prompt_tokens += len(submission.prompt_tokens)
            try:
                await self._client.submit(submission, self._mailbox)
            except HotsetError as error:
                raise _refusal(error) from error

    async def pieces(self) -> AsyncIterator[ChoicePiece]:
        """Every choice's parts as they come, until all have ended.

        Raises:
            EngineLost: the engine went away.
            EngineFault: it ended a choice with an error.
            ShuttingDown: `interrupt` was called.
        """
        while self._open:
            arrival = await self._mailbox.get()
            if isinstance(arrival, EngineGone):
                raise EngineLost("the engine that worked on this request went away; send the request again")
            if isinstance(arrival, Interrupted):
                raise ShuttingDown("the server shut down before this answer was finished")
            choice = self._open.get((arrival.request_id, arrival.event.choice))
            if choice is not None:
                yield self._take(choice, arrival.event)

    def _take(self, choice: _Choice, event: engine_pb2.TokenEvent) -> ChoicePiece:
        ending = event.finish_reason
        if ending == engine_pb2.FINISH_REASON_ERROR:
            raise EngineFault(f"the engine could not finish this request: {event.error or 'no reason given'}")
        if ending == engine_pb2.FINISH_REASON_ABORT:
            raise EngineLost("the engine ended this request early; send it again")
        self._count_cached(event)
        before = choice.text.tokens
        ended = ending != engine_pb2.FINISH_REASON_UNSPECIFIED
        piece = choice.text.feed(
            event.tokens, last_is_end=ending == engine_pb2.FINISH_REASON_STOP, ended=ended
        )
        new = choice.text.tokens - before
        self.tally.completion_tokens += new
        if new:
            self._metrics.tokens(choice.clock, new)
            if self.tally.first_token_seconds is None:
                self.tally.first_token_seconds = choice.clock.seconds
        finish: Finish | None = None
        if piece.stopped or ended:
            finish = "length" if ending == engine_pb2.FINISH_REASON_LENGTH and not piece.stopped else "stop"
            self._end(choice, finish, at_engine=not ended)
        return ChoicePiece(choice.index, piece, event.prompt, finish)

    def _end(self, choice: _Choice, finish: Finish, *, at_engine: bool) -> None:
        """Book a choice's end; `at_engine` also stops it there, when its text ended before its tokens."""
        del self._open[choice.request_id, choice.number]
        if at_engine:
            self._client.abort(choice.request_id, (choice.number,))
        if not any(request_id == choice.request_id for request_id, _ in self._open):
            self._client.forget(choice.request_id)
        self.tally.finishes.append(finish)
        self._metrics.ended(self._endpoint, finish, choice.clock)

    def _count_cached(self, event: engine_pb2.TokenEvent) -> None:
        known = self._cached.get(event.request_id, 0)
        # The choices of a prompt share it; the prompt counts once.
        if event.cached_prompt_tokens > known:
            self.tally.cached_tokens += event.cached_prompt_tokens - known
            self._cached[event.request_id] = event.cached_prompt_tokens


def _refusal(error: HotsetError) -> ApiError:
    """The engine's refusal of a submission, as the client is told."""
    match error:
        case InvalidRequest():
            return BadRequest(str(error))
        case NoRoom():
            return Overloaded(f"the server is full: {error}")
        case StateConflict():
            return ShuttingDown(f"the engine takes nothing new: {error}")
        case _ if type(error) is HotsetError:
            return InternalFault(f"the engine failed on this request: {error}")
        case _:
            return EngineLost(f"the engine could not be reached: {error}; send the request again")

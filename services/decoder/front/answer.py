"""One HTTP request's choices at the engine: submitted, read as they grow, ended whatever happens.

When the engine dies, what is open is handed to another one, or to its next life, with the tokens so far;
text, counts and clocks stay here and go on. Each life has a mailbox of its own, so that nothing late is taken
for news. Knows events and text; nothing of HTTP, JSON or SSE. In this order: `submit`, `pieces`, `close`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hotset.v1 import engine_pb2

from services.contract.errors import HotsetError, NoRoom, Unavailable
from services.decoder.front.choice_text import ChoiceText, Piece
from services.decoder.front.engine_client import EngineClient, EngineGone, Interrupted, Mailbox
from services.decoder.front.engines import Engines
from services.decoder.front.errors import EngineFault, EngineLost, Overloaded, ShuttingDown
from services.decoder.front.request_metrics import ChoiceClock, Endpoint, Outcome, RequestMetrics
from services.decoder.front.sampling import Plan
from services.decoder.front.submission import Submission, open_choices, refusal
from services.decoder.front.text.tokenizer import TextTokenizer
from services.decoder.front.unless import Stopped, unless

Finish = Literal["stop", "length"]

_GONE_SECONDS = 3.0
"""How much later than a failed call an engine's death may be noticed."""
_ROOM_PAUSE_SECONDS = 0.1

_log = logging.getLogger(__name__)


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
    submission: Submission
    number: int  # among the prompt's choices
    text: ChoiceText
    clock: ChoiceClock


class Answer:
    """All choices of one HTTP request. Whoever makes one calls `close`, which ends what still runs."""

    def __init__(
        self,
        client: EngineClient,
        engines: Engines,
        tokenizer: TextTokenizer,
        metrics: RequestMetrics,
        *,
        endpoint: Endpoint,
        tally: Tally,
        began: float,
        restart_seconds: float,
    ) -> None:
        """Arguments.

        Args:
            client: the engine that is to answer.
            engines: asked for another one, or its next life, if it dies.
            tokenizer: of the checkpoint.
            metrics: told of every token and end.
            endpoint: a label of the metrics.
            tally: kept up to date.
            began: when the HTTP request came, monotonic seconds.
            restart_seconds: how long a next life may take to come and to have room.
        """
        self.tally = tally
        self._client = client
        self._engines = engines
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._endpoint: Endpoint = endpoint
        self._began = began
        self._restart_seconds = restart_seconds
        self._mailbox: Mailbox = asyncio.Queue()
        self._interrupted = asyncio.Event()
        self._submissions: list[Submission] = []
        self._open: dict[tuple[str, int], _Choice] = {}

    def interrupt(self) -> None:
        """Make `pieces` raise ShuttingDown."""
        self._interrupted.set()
        self._mailbox.put_nowait(Interrupted())

    def close(self, outcome: Outcome) -> None:
        """End whatever still runs at the engine, and book it as `outcome`; again: nothing."""
        for request_id in {request_id for request_id, _ in self._open}:
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
            EngineLost, ShuttingDown: the engine does not answer, or takes nothing new. That it dies now is
                for `pieces` to find out and mend.
        """
        self._submissions = [
            Submission(plan.submission(f"{answer_id}-{number}", tuple(prompt), limit))
            for number, prompt in enumerate(prompts)
        ]
        for number, submission in enumerate(self._submissions):
            self.tally.prompt_tokens += submission.prompt_tokens
            for choice in range(plan.n):
                text = ChoiceText(
                    self._tokenizer,
                    stop_texts=plan.stop_texts,
                    keep_stop_text=plan.keep_stop_text,
                    min_tokens=plan.min_tokens,
                    continues=continues,
                    tells_tokens=plan.logprobs.answer,
                )
                self._open[submission.request_id, choice] = _Choice(
                    number * plan.n + choice,
                    submission,
                    choice,
                    text,
                    ChoiceClock(self._began, self._client.engine),
                )
        for submission in self._submissions:
            try:
                await self._client.submit(submission.to_submit(), self._mailbox)
            except HotsetError as error:
                if await self._is_lost(error):
                    return
                raise refusal(error) from error

    async def pieces(self) -> AsyncIterator[ChoicePiece]:
        """Every choice's parts as they come, until all have ended; an engine's death is a pause.

        Raises:
            EngineLost: the engine went away, and does not come back.
            RequestEndsEngines: it went away more than once with this request.
            EngineFault: it ended a choice with an error.
            Overloaded: a choice waited longer than it may.
            ShuttingDown: `interrupt` was called.
            BadRequest, Overloaded: the next life does not take what the first one took.
        """
        while self._open:
            arrival = await self._mailbox.get()
            if isinstance(arrival, EngineGone):
                await self._go_on()
                continue
            if isinstance(arrival, Interrupted):
                raise _cut_short()
            choice = self._open.get((arrival.request_id, arrival.event.choice))
            if choice is not None:
                yield self._take(choice, arrival.event)

    async def _go_on(self) -> None:
        """Hand to the engine's next life what is open."""
        lost, self._mailbox = self._client, asyncio.Queue()
        rest = [submission for submission in self._submissions if submission.open_choices]
        for submission in rest:
            submission.outlive(ran=lost.may_have_run(submission.request_id))
        try:
            async with asyncio.timeout(self._restart_seconds):
                await unless(self._interrupted.wait(), self._resubmit(rest))
        except Stopped:
            raise _cut_short() from None
        except TimeoutError:
            raise EngineLost(
                "the engine that worked on this request went away and did not take it up again within "
                f"{self._restart_seconds:g} s ({self._engines.detail}); send the request again later"
            ) from None

    async def _resubmit(self, rest: Sequence[Submission]) -> None:
        self._client = await self._engines.next_life()
        for choice in self._open.values():
            choice.clock.engine = self._client.engine
        for submission in rest:
            while True:
                try:
                    await self._client.submit(submission.to_submit(), self._mailbox)
                except NoRoom:
                    # It was taken once; a newer request that was quicker is no reason to refuse it now.
                    await asyncio.sleep(_ROOM_PAUSE_SECONDS)
                    continue
                except HotsetError as error:
                    if await self._is_lost(error):
                        return
                    raise refusal(error) from error
                break
        choices = open_choices(rest)
        self._metrics.resubmitted(self._client.engine, choices)
        request_ids = ",".join(submission.request_id for submission in rest)
        _log.warning("resubmitted requests=%s choices=%d", request_ids, choices)

    async def _is_lost(self, error: HotsetError) -> bool:
        """Whether a submission failed because the engine goes away; then `pieces` will know."""
        if not isinstance(error, Unavailable) or not await self._client.is_gone_within(_GONE_SECONDS):
            return False
        self._mailbox.put_nowait(EngineGone())
        return True

    def _take(self, choice: _Choice, event: engine_pb2.TokenEvent) -> ChoicePiece:
        ending = event.finish_reason
        if ending == engine_pb2.FINISH_REASON_ERROR:
            raise EngineFault(f"the engine could not finish this request: {event.error or 'no reason given'}")
        if ending == engine_pb2.FINISH_REASON_NO_ROOM:
            raise Overloaded(f"the server is full: {event.error}")
        if ending == engine_pb2.FINISH_REASON_ABORT:
            raise EngineLost("the engine ended this request early; send it again")
        self.tally.cached_tokens += choice.submission.take(event)
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
        submission = choice.submission
        del self._open[submission.request_id, choice.number]
        submission.end(choice.number)
        if at_engine:
            self._client.abort(submission.request_id, (choice.number,))
        if not submission.open_choices:
            self._client.forget(submission.request_id)
        self.tally.finishes.append(finish)
        self._metrics.ended(self._endpoint, finish, choice.clock)


def _cut_short() -> ShuttingDown:
    return ShuttingDown("the server shut down before this answer was finished")

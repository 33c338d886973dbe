"""Answers one generation request, whole or as a stream: the order of business that both routes share.

Knows answers and shapes; a shape says how its route tells them (chat_shape.py, completion_shape.py).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from hotset.v1 import engine_pb2
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from services.decoder.front import sse
from services.decoder.front.answer import Answer, ChoicePiece, Finish, Tally
from services.decoder.front.auth import tenant_of
from services.decoder.front.choice_text import ShownToken
from services.decoder.front.disconnect import ClientLeft, unless_client_leaves
from services.decoder.front.errors import ApiError, InternalFault
from services.decoder.front.plain_events import PlainEvents
from services.decoder.front.record import Record
from services.decoder.front.request_metrics import Endpoint
from services.decoder.front.sampling import Plan, answer_tokens
from services.decoder.front.schema.answers import PromptTokensDetails, Usage
from services.decoder.front.schema.sampling_fields import UsageTold
from services.decoder.front.state import FrontState

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class WholeChoice:
    """One choice, gathered."""

    text: str = ""
    tokens: list[ShownToken] = field(default_factory=list)
    prompt: Sequence[engine_pb2.Token] = ()
    finish: Finish = "stop"


class Shape(Protocol):
    """How a route tells an answer."""

    def opening(self) -> Iterable[BaseModel]:
        """Chunks that come before any token."""

    def chunks(self, piece: ChoicePiece) -> Iterable[BaseModel]:
        """Chunks that tell `piece`."""

    def plain_text(self, piece: ChoicePiece) -> str | None:
        """Its text, if the one chunk that tells it differs in that alone from others of the choice."""

    def usage_chunk(self, usage: Usage) -> BaseModel:
        """The last chunk, with token counts."""

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> BaseModel:
        """The answer in one body."""


@dataclass(frozen=True)
class Generation:
    """One request, checked and tokenized.

    Attributes:
        limit: longest prompt + answer, tokens.
        continues: answers go on from their prompts' text.
        usage_told: when a stream tells token counts.
    """

    endpoint: Endpoint
    answer_id: str
    prompts: Sequence[Sequence[int]]
    plan: Plan
    limit: int
    continues: bool
    stream: bool
    usage_told: UsageTold

    def check_length(self) -> None:
        """Refuse what the engine would.

        Raises:
            BadRequest: a prompt and its answer do not fit the limit.
        """
        for prompt in self.prompts:
            answer_tokens(len(prompt), self.plan.most_tokens, self.limit)


async def respond(
    front: FrontState, request: Request, record: Record, generation: Generation, shape: Shape
) -> Response:
    """Submit, gather or stream, and end at the engine whatever the client did not wait for.

    Raises:
        ApiError: before anything was sent; within a stream it becomes an event.
    """
    front.role.check(generation.plan)
    generation.check_length()
    record.answer_id = generation.answer_id
    front.running.check_open()
    if front.role.node is not None and not generation.plan.logprobs.prompt:  # whose prompts are never found
        tenant = tenant_of(request)
        reading = front.role.node.read(
            generation.prompts,
            request.headers.get("authorization"),
            generation.plan.cache_salt.removeprefix(tenant).decode(),
            generation.plan.priority,
        )
        try:
            await unless_client_leaves(request.receive, front.running.before(reading))
        except ClientLeft:
            record.client_left = True
            return Response(status_code=499)  # nobody reads it
    front.running.check_open()
    client = front.engines.choose(generation.prompts[0], generation.plan.cache_salt)
    answer = Answer(
        client,
        front.engines,
        front.tokenizer,
        front.metrics,
        endpoint=generation.endpoint,
        tally=record.tally,
        began=record.began,
        restart_seconds=front.restart_seconds,
    )
    with ExitStack() as cleanup:
        cleanup.enter_context(front.running.holding(answer))
        cleanup.callback(answer.close, "abort")
        try:
            submitting = answer.submit(
                generation.answer_id,
                generation.prompts,
                generation.plan,
                limit=generation.limit,
                continues=generation.continues,
            )
            await unless_client_leaves(request.receive, submitting)
            if not generation.stream:
                return await unless_client_leaves(request.receive, _whole(answer, generation, shape))
        except ClientLeft:
            record.client_left = True
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            refused = isinstance(error, ApiError) and error.status_code < 500
            answer.close("refused" if refused else "error")
            raise
        rest = cleanup.pop_all()

        def on_end(left: bool) -> None:
            record.client_left = left
            rest.close()

        return sse.EventStream(_events(answer, record, generation, shape), on_end)


async def _whole(answer: Answer, generation: Generation, shape: Shape) -> Response:
    choices = [WholeChoice() for _ in range(len(generation.prompts) * generation.plan.n)]
    async for part in answer.pieces():
        choice = choices[part.index]
        choice.text += part.piece.text
        choice.tokens += part.piece.tokens
        choice.prompt = part.prompt or choice.prompt
        choice.finish = part.finish or choice.finish
    body = shape.whole(choices, _usage(answer.tally))
    return Response(body.model_dump_json(), media_type="application/json")


async def _events(
    answer: Answer, record: Record, generation: Generation, shape: Shape
) -> AsyncGenerator[bytes, None]:
    def told(chunk: BaseModel) -> bytes:
        """With `usage` as asked for: not there at all, null until the last chunk, or so far."""
        if generation.usage_told == "always":
            chunk = chunk.model_copy(update={"usage": _usage(answer.tally)})
        left_out = {"usage"} if generation.usage_told == "never" else None
        return sse.event(chunk.model_dump_json(exclude=left_out))

    try:
        for chunk in shape.opening():
            yield told(chunk)
        plain = PlainEvents(shape, told)
        async for part in answer.pieces():
            text = None if generation.usage_told == "always" else shape.plain_text(part)
            if text is not None:
                yield plain.event(part.index, text)
                continue
            for chunk in shape.chunks(part):
                yield told(chunk)
        if generation.usage_told != "never":
            yield sse.event(shape.usage_chunk(_usage(answer.tally)).model_dump_json())
        yield sse.DONE
    except Exception as error:  # noqa: BLE001  # the status is sent; an event is the only way left to say it
        answer.close("error")
        failure = (
            error if isinstance(error, ApiError) else InternalFault("the server failed; its log says why")
        )
        if failure is not error:
            _log.exception("stream_failed id=%s", record.request_id)
        record.error = f"{failure.answered_code}: {failure.detail}"
        yield sse.event(failure.body().model_dump_json())


def _usage(tally: Tally) -> Usage:
    return Usage(
        prompt_tokens=tally.prompt_tokens,
        completion_tokens=tally.completion_tokens,
        total_tokens=tally.prompt_tokens + tally.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=tally.cached_tokens),
    )

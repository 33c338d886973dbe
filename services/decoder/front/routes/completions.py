"""/v1/completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from starlette.responses import Response

from services.contract.errors import InvalidRequest
from services.decoder.front.auth import may_be_urgent, tenant_of
from services.decoder.front.completion_shape import CompletionShape
from services.decoder.front.errors import BadRequest
from services.decoder.front.openapi import GENERATION_ERRORS, streamed
from services.decoder.front.record import record_of
from services.decoder.front.responder import Generation, respond
from services.decoder.front.sampling import LogprobsWanted, Plan, make_plan
from services.decoder.front.schema.answers import Completion
from services.decoder.front.schema.completions import CompletionRequest
from services.decoder.front.state import FrontState, front_state
from services.decoder.front.text.prompt import completion_prompts
from services.decoder.front.text.tokenizer import TextTokenizer

DEFAULT_MAX_TOKENS = 16
"""OpenAI's own default for this route."""

MAX_PROMPT_LOGPROBS = 500_000
"""Entries an echo with log probabilities may have; a message to the front holds about a million."""


def add_routes(app: FastAPI) -> None:
    """Add the route to `app`."""
    app.add_api_route(
        "/v1/completions",
        completions,
        methods=["POST"],
        response_model=Completion,
        responses=GENERATION_ERRORS | streamed("text_completion"),
        tags=["generation"],
    )


async def completions(
    body: CompletionRequest, request: Request, front: Annotated[FrontState, Depends(front_state)]
) -> Response:
    """Continue one or more prompts."""
    front.check_model(body.model)
    front.check_priority(body.priority, may_be_urgent=may_be_urgent(request))
    engine = front.engine()
    echo, scored = bool(body.echo), body.logprobs is not None
    plan = make_plan(
        body,
        LogprobsWanted(answer=scored, top=body.logprobs or 0, prompt=echo and scored),
        default_most_tokens=DEFAULT_MAX_TOKENS,
        vocab_size=engine.vocab_size,
        tenant=tenant_of(request),
    )
    try:
        prompts = await asyncio.to_thread(completion_prompts, front.tokenizer, body.prompt)
    except InvalidRequest as error:
        raise BadRequest(str(error), param="prompt") from error
    _check_prompt_logprobs(prompts, plan)
    answer_id = f"cmpl-{uuid.uuid4().hex}"
    shape = CompletionShape(
        answer_id=answer_id,
        created=int(time.time()),
        model=front.model,
        fingerprint=front.fingerprint(engine),
        tokenizer=front.tokenizer,
        n=plan.n,
        top_logprobs=body.logprobs,
        echoed=_texts(front.tokenizer, body, prompts) if echo else None,
    )
    generation = Generation(
        endpoint="completions",
        answer_id=answer_id,
        prompts=prompts,
        plan=plan,
        limit=engine.max_model_len_tokens,
        continues=True,
        stream=bool(body.stream),
        usage_told=body.usage_told,
    )
    return await respond(front, request, record_of(request), generation, shape)


def _texts(tokenizer: TextTokenizer, body: CompletionRequest, prompts: Sequence[Sequence[int]]) -> list[str]:
    """Each prompt's text: as the client wrote it, or what its ids stand for."""
    if isinstance(body.prompt, str):
        return [body.prompt]
    return [
        item if isinstance(item, str) else tokenizer.decode(ids, skip_special_tokens=False)
        for item, ids in zip(body.prompt if body.prompt_count > 1 else [body.prompt[0]], prompts, strict=True)
    ]


def _check_prompt_logprobs(prompts: Sequence[Sequence[int]], plan: Plan) -> None:
    if plan.logprobs.prompt:
        entries = plan.n * (plan.logprobs.top + 1) * max(map(len, prompts))
        if entries > MAX_PROMPT_LOGPROBS:
            raise BadRequest(
                f"with echo, n x prompt tokens x (logprobs + 1) is {entries}, above {MAX_PROMPT_LOGPROBS}",
                param="logprobs",
            )

"""/v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from starlette.responses import Response

from services.contract.errors import InvalidRequest
from services.decoder.front.auth import may_be_urgent, tenant_of
from services.decoder.front.chat_shape import ChatShape
from services.decoder.front.errors import BadRequest
from services.decoder.front.openapi import GENERATION_ERRORS, streamed
from services.decoder.front.record import record_of
from services.decoder.front.responder import Generation, respond
from services.decoder.front.sampling import LogprobsWanted, make_plan
from services.decoder.front.schema.answers import ChatCompletion
from services.decoder.front.schema.chat import ChatRequest
from services.decoder.front.state import FrontState, front_state
from services.decoder.front.text.prompt import chat_prompt


def add_routes(app: FastAPI) -> None:
    """Add the route to `app`."""
    app.add_api_route(
        "/v1/chat/completions",
        chat_completions,
        methods=["POST"],
        response_model=ChatCompletion,
        responses=GENERATION_ERRORS | streamed("chat.completion.chunk"),
        tags=["generation"],
    )


async def chat_completions(
    body: ChatRequest, request: Request, front: Annotated[FrontState, Depends(front_state)]
) -> Response:
    """Answer a conversation."""
    front.check_model(body.model)
    front.check_priority(body.priority, may_be_urgent=may_be_urgent(request))
    engine = front.engine()
    top = body.top_logprobs or 0
    plan = make_plan(
        body,
        LogprobsWanted(answer=bool(body.logprobs), top=top),
        default_most_tokens=None,
        vocab_size=engine.vocab_size,
        tenant=tenant_of(request),
    )
    messages = [message.for_template() for message in body.messages]
    try:
        prompt = await asyncio.to_thread(chat_prompt, front.tokenizer, front.template, messages)
    except InvalidRequest as error:
        raise BadRequest(str(error), param="messages") from error
    answer_id = f"chatcmpl-{uuid.uuid4().hex}"
    shape = ChatShape(
        answer_id=answer_id,
        created=int(time.time()),
        model=front.model,
        fingerprint=front.fingerprint(engine),
        tokenizer=front.tokenizer,
        n=plan.n,
        top_logprobs=top if body.logprobs else None,
    )
    generation = Generation(
        endpoint="chat",
        answer_id=answer_id,
        prompts=[prompt],
        plan=plan,
        limit=engine.max_model_len_tokens,
        continues=False,
        stream=bool(body.stream),
        usage_told=body.usage_told,
    )
    return await respond(front, request, record_of(request), generation, shape)

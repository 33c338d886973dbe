"""/tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Depends, FastAPI
from starlette.responses import Response

from services.contract.errors import InvalidRequest
from services.decoder.front.errors import BadRequest
from services.decoder.front.logprobs import token_text
from services.decoder.front.openapi import MODEL_ERRORS, TEXT_ERRORS
from services.decoder.front.schema.text import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from services.decoder.front.state import FrontState, front_state


def add_routes(app: FastAPI) -> None:
    """Add the routes to `app`."""
    errors = MODEL_ERRORS | TEXT_ERRORS
    app.add_api_route(
        "/tokenize",
        tokenize,
        methods=["POST"],
        response_model=TokenizeAnswer,
        responses=errors,
        tags=["text"],
    )
    app.add_api_route(
        "/detokenize",
        detokenize,
        methods=["POST"],
        response_model=DetokenizeAnswer,
        responses=errors,
        tags=["text"],
    )


async def tokenize(body: TokenizeRequest, front: Annotated[FrontState, Depends(front_state)]) -> Response:
    """Token ids of a text, or of a conversation after the chat template."""
    front.check_model(body.model)
    told = front.engines.description
    longest = None if told is None else told.max_model_len_tokens
    try:
        answer = await asyncio.to_thread(_tokenized, front, body, longest)
    except InvalidRequest as error:
        raise BadRequest(str(error), param="prompt" if body.messages is None else "messages") from error
    return Response(answer, media_type="application/json")


async def detokenize(
    body: DetokenizeRequest, front: Annotated[FrontState, Depends(front_state)]
) -> DetokenizeAnswer:
    """The text of token ids."""
    front.check_model(body.model)
    try:
        text = await asyncio.to_thread(_decode, front, body)
    except InvalidRequest as error:
        raise BadRequest(str(error), param="tokens") from error
    return DetokenizeAnswer(prompt=text)


def _tokenized(front: FrontState, body: TokenizeRequest, longest: int | None) -> str:
    """The answer's JSON: that of a long text takes seconds to make, which the event loop has not."""
    tokens = _encode(front, body)
    strings = [token_text(front.tokenizer, token) for token in tokens] if body.return_token_strs else None
    answer = TokenizeAnswer(count=len(tokens), max_model_len=longest, tokens=tokens, token_strs=strings)
    return answer.model_dump_json()


def _decode(front: FrontState, body: DetokenizeRequest) -> str:
    front.tokenizer.check_ids(body.tokens)
    return front.tokenizer.decode(body.tokens, skip_special_tokens=False)


def _encode(front: FrontState, body: TokenizeRequest) -> list[int]:
    if body.messages is None:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        return front.tokenizer.encode(body.prompt or "", add_special_tokens=special)
    text = front.template.render([message.for_template() for message in body.messages])
    return front.tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))

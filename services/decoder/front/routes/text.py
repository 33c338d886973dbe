"""/tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Depends, FastAPI

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


async def tokenize(
    body: TokenizeRequest, front: Annotated[FrontState, Depends(front_state)]
) -> TokenizeAnswer:
    """Token ids of a text, or of a conversation after the chat template."""
    front.check_model(body.model)
    try:
        tokens = await asyncio.to_thread(_encode, front, body)
    except InvalidRequest as error:
        raise BadRequest(str(error), param="prompt" if body.messages is None else "messages") from error
    told = front.engines.description
    return TokenizeAnswer(
        count=len(tokens),
        max_model_len=None if told is None else told.max_model_len_tokens,
        tokens=tokens,
        token_strs=[token_text(front.tokenizer, token) for token in tokens]
        if body.return_token_strs
        else None,
    )


async def detokenize(
    body: DetokenizeRequest, front: Annotated[FrontState, Depends(front_state)]
) -> DetokenizeAnswer:
    """The text of token ids."""
    front.check_model(body.model)
    try:
        front.tokenizer.check_ids(body.tokens)
    except InvalidRequest as error:
        raise BadRequest(str(error), param="tokens") from error
    text = await asyncio.to_thread(front.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return DetokenizeAnswer(prompt=text)


def _encode(front: FrontState, body: TokenizeRequest) -> list[int]:
    if body.messages is None:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        return front.tokenizer.encode(body.prompt or "", add_special_tokens=special)
    text = front.template.render([message.for_template() for message in body.messages])
    return front.tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))

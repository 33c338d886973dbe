"""/v1/models: the one model that is served."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, FastAPI

from services.decoder.front.openapi import MODEL_ERRORS, PLAIN_ERRORS
from services.decoder.front.schema.operations import ModelCard, ModelList
from services.decoder.front.state import FrontState, front_state


def add_routes(app: FastAPI) -> None:
    """Add the routes to `app`."""
    app.add_api_route("/v1/models", models, response_model=ModelList, responses=PLAIN_ERRORS, tags=["models"])
    # A model's name may have slashes.
    app.add_api_route(
        "/v1/models/{model:path}", model, response_model=ModelCard, responses=MODEL_ERRORS, tags=["models"]
    )


async def models(front: Annotated[FrontState, Depends(front_state)]) -> ModelList:
    """All models that are served."""
    return ModelList(data=[_card(front)])


async def model(model: str, front: Annotated[FrontState, Depends(front_state)]) -> ModelCard:
    """One of them."""
    front.check_model(model)
    return _card(front)


def _card(front: FrontState) -> ModelCard:
    told = front.engines.description
    return ModelCard(
        id=front.model,
        created=front.created,
        max_model_len=None if told is None else told.max_model_len_tokens,
    )

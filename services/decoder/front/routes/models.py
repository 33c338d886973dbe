"""/v1/models: the one model that is served; and the same for routers that ask as they would ask SGLang."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, FastAPI

from services.decoder.front.openapi import MODEL_ERRORS, PLAIN_ERRORS
from services.decoder.front.schema.operations import ModelCard, ModelInfo, ModelList
from services.decoder.front.state import FrontState, front_state
from services.decoder.front.version import version


def add_routes(app: FastAPI) -> None:
    """Add the routes to `app`."""
    app.add_api_route("/v1/models", models, response_model=ModelList, responses=PLAIN_ERRORS, tags=["models"])
    # A model's name may have slashes.
    app.add_api_route(
        "/v1/models/{model:path}", model, response_model=ModelCard, responses=MODEL_ERRORS, tags=["models"]
    )
    for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
        app.add_api_route(path, model_info, response_model=ModelInfo, responses=PLAIN_ERRORS, tags=["models"])


async def models(front: Annotated[FrontState, Depends(front_state)]) -> ModelList:
    """All models that are served."""
    return ModelList(data=[_card(front)])


async def model(model: str, front: Annotated[FrontState, Depends(front_state)]) -> ModelCard:
    """One of them."""
    front.check_model(model)
    return _card(front)


async def model_info(front: Annotated[FrontState, Depends(front_state)]) -> ModelInfo:
    """What is served, for routers."""
    told = front.engines.description
    return ModelInfo(
        model_path=front.model,
        served_model_name=front.model,
        max_context_length=None if told is None else told.max_model_len_tokens,
        max_running_requests=front.engines.rows,
        version=version(),
    )


def _card(front: FrontState) -> ModelCard:
    told = front.engines.description
    return ModelCard(
        id=front.model,
        created=front.created,
        max_model_len=None if told is None else told.max_model_len_tokens,
    )

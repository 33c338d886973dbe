"""The answers of the routes for operators and of /v1/models."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class Health(BaseModel):
    """The process lives; whether it serves is `status`."""

    status: Literal["starting", "ok", "draining"]
    detail: str = Field(description="the engine's progress, for people")


class Ready(BaseModel):
    """Requests are taken."""

    status: Literal["ready"] = "ready"


class Version(BaseModel):
    """What runs here."""

    version: str


class ModelInfo(BaseModel):
    """What SGLang's routers ask a server before they send it anything; names and meanings are SGLang's."""

    model_path: str = Field(
        description="the name clients use; where the checkpoint lies is nobody's business"
    )
    served_model_name: str
    is_generation: Literal[True] = True
    max_context_length: int | None = Field(
        description="longest prompt + answer, tokens; null until an engine is up"
    )
    max_running_requests: int = Field(description="choices that run at once, over all engines that serve")
    version: str


class ModelCard(BaseModel):
    """A model that can be named in requests."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix time at which this server began, seconds")
    owned_by: Literal["hotset"] = "hotset"
    max_model_len: int | None = Field(
        description="longest prompt + answer, tokens; null until the engine is up"
    )


class ModelList(BaseModel):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[ModelCard]

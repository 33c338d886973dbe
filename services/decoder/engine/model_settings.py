"""What the settings mean for one model: one that chooses by itself leaves less to choose.

Knows settings and the model's sizes. What an operator said and the model does not do is refused, not ignored.
"""

from __future__ import annotations

import math
from typing import TypeVar

from pydantic import ValidationError

from services.contract.errors import SetupError
from services.decoder.kernels.record_code import TILE
from services.decoder.models.spec import ModelSpec
from services.decoder.settings import DecoderSettings

Settings = TypeVar("Settings", bound=DecoderSettings)


def settings_for(settings: Settings, spec: ModelSpec) -> Settings:
    """The settings as they hold for the model.

    Raises:
        SetupError: something was asked for that this model's attention is not, or that does not fit it.
    """
    kind, own = spec.config.model_type, _own(spec)
    _check_index_dtype(settings, spec)
    _check_record_dtype(settings, spec)
    if own is None:
        if settings.selector not in ("quest", "everything"):
            raise SetupError(
                f"--selector {settings.selector}: a {kind} model does not choose; use quest or everything"
            )
        return settings
    for name, value in own.items():
        asked = getattr(settings, name)
        if name in settings.model_fields_set and asked != value:
            raise SetupError(f"--{name.replace('_', '-')} {asked}: {_choice(spec)}; leave it out")
    said = {name: getattr(settings, name) for name in settings.model_fields_set}
    if spec.blocks is not None and "page_tokens" not in said:
        own["page_tokens"] = math.lcm(settings.page_tokens, spec.blocks.block_tokens)
    try:
        return type(settings).model_validate(said | own)
    except ValidationError as error:
        raise SetupError(f"{error.errors()[0]['msg']} (of a {kind} model's own choice)") from error


def _check_index_dtype(settings: Settings, spec: ModelSpec) -> None:
    latent, asked = spec.latent, settings.index_dtype
    if latent is None and asked != "auto":
        kind = spec.config.model_type
        raise SetupError(f"--index-dtype {asked}: a {kind} model has no indexer; leave it out")
    if latent is not None and asked == "float8" and latent.index_dim & (latent.index_dim - 1):
        raise SetupError(
            f"--index-dtype float8 needs index keys of 2^n numbers, these have {latent.index_dim}"
        )


def _check_record_dtype(settings: Settings, spec: ModelSpec) -> None:
    latent, asked = spec.latent, settings.record_dtype
    if asked == "auto":
        return
    if latent is None:
        kind = spec.config.model_type
        raise SetupError(
            f"--record-dtype {asked}: a {kind} model keeps keys and values, not latent records; leave it out"
        )
    if latent.latent % TILE:
        raise SetupError(
            f"--record-dtype float8 codes {TILE} latent numbers at a time, and records of this model have "
            f"{latent.latent}; leave it out"
        )


def _own(spec: ModelSpec) -> dict[str, object] | None:
    """The settings that are the model's to make; None where they are the operator's."""
    if spec.latent is not None:
        top_k = spec.latent.top_k
        return {"selector": "dsa", "block_tokens": 1, "budget_tokens": top_k, "dense_layers": 0}
    blocks = spec.blocks
    if blocks is None:
        return None
    return {
        "selector": blocks.selector,
        "block_tokens": blocks.block_tokens,
        "budget_tokens": blocks.read_blocks * blocks.block_tokens,
        "dense_layers": blocks.dense_layers,
    }


def _choice(spec: ModelSpec) -> str:
    """What the model chooses, for people."""
    kind = spec.config.model_type
    if spec.latent is not None:
        return f"a {kind} model's own indexer chooses, {spec.latent.top_k} single tokens in every layer"
    assert spec.blocks is not None
    return f"a {kind} model itself chooses, {spec.blocks.top_k} blocks of {spec.blocks.block_tokens} tokens"

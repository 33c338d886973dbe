"""What the settings mean for one model: one that chooses by an indexer of its own leaves less to choose.

Knows settings and the model's sizes. What an operator said and the model does not do is refused, not ignored.
"""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from services.contract.errors import SetupError
from services.decoder.models.spec import ModelSpec
from services.decoder.settings import DecoderSettings

Settings = TypeVar("Settings", bound=DecoderSettings)


def settings_for(settings: Settings, spec: ModelSpec) -> Settings:
    """The settings as they hold for the model.

    Raises:
        SetupError: something was asked for that this model's attention is not, or that does not fit it.
    """
    latent, kind = spec.latent, spec.config.model_type
    if latent is None:
        if settings.selector == "dsa":
            raise SetupError(f"--selector dsa: a {kind} model has no indexer; use quest or everything")
        if settings.index_dtype != "auto":
            raise SetupError(
                f"--index-dtype {settings.index_dtype}: a {kind} model has no indexer; leave it out"
            )
        return settings
    if settings.index_dtype == "float8" and latent.index_dim & (latent.index_dim - 1):
        raise SetupError(
            f"--index-dtype float8 needs index keys of 2^n numbers, these have {latent.index_dim}"
        )
    own: dict[str, object] = {
        "selector": "dsa",
        "block_tokens": 1,
        "budget_tokens": latent.top_k,
        "dense_layers": 0,
    }
    for name, value in own.items():
        asked = getattr(settings, name)
        if name in settings.model_fields_set and asked != value:
            raise SetupError(
                f"--{name.replace('_', '-')} {asked}: a {kind} model's own indexer chooses, {latent.top_k} "
                f"single tokens in every layer; leave it out"
            )
    said = {name: getattr(settings, name) for name in settings.model_fields_set}
    try:
        return type(settings).model_validate(said | own)
    except ValidationError as error:
        raise SetupError(f"{error.errors()[0]['msg']} (of a {kind} model's own indexer)") from error

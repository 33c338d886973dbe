"""The engine's settings: the decoder's, and where the front meets it.

Knows no more than flags.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from services.decoder.settings import DecoderSettings


class EngineSettings(DecoderSettings):
    """hotset engine: started by the decoder's front, one a device."""

    engine_socket: Path = Field(description="path of the Unix socket that the engine listens on")
    engine_index: int = Field(0, ge=0, description="number of this engine among the front's")
    store_wait_seconds: float = Field(
        30.0, ge=0, description="seconds that an unreachable kvstore is waited for at start"
    )

    @model_validator(mode="after")
    def _has_one_device(self) -> Self:
        if len(self.devices) > 1:
            raise ValueError("an engine has one device; the front starts one for each of several")
        return self

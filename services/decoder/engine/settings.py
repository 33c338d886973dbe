"""The engine's settings: the decoder's, and where the front meets it.

Knows no more than flags.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from services.decoder.settings import DecoderSettings


class EngineSettings(DecoderSettings):
    """hotset engine: started by the decoder's front, one a device."""

    engine_socket: Path = Field(description="path of the Unix socket that the engine listens on")
    engine_index: int = Field(0, ge=0, description="number of this engine among the front's")
    store_wait_seconds: float = Field(
        30.0, ge=0, description="seconds that an unreachable kvstore is waited for at start"
    )

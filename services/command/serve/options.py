"""What `hotset serve` was asked for: the decoder's settings, and flags for the store that it starts.

Knows the decoder's flags by its settings class, so that a wrong one is refused before anything starts.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from services.contract.errors import SetupError
from services.decoder.settings import DecoderSettings


class ServeSettings(DecoderSettings):
    """hotset serve: an OpenAI-compatible server with a store of its own, unless --kvstore names another."""

    model: Path = Field(
        Path(),
        description="directory of a Hugging Face checkpoint; default: the bundled SmolLM2-135M-Instruct",
    )
    kvstore: str = Field(
        "", description="gRPC address of a running kvstore, host:port or unix:/path; default: one is started"
    )
    store_args: str = Field(
        "", description="flags of the store that is started, --store-args='--arena-bytes 4GiB'"
    )


@dataclass(frozen=True, slots=True)
class Options:
    """Read from flags, environment and file."""

    host: str
    port: int
    model: str  # "" = the bundled one
    served_name: str  # "" = the model's directory
    with_keys: bool
    own_store: bool
    decoder_args: tuple[str, ...]
    store_args: tuple[str, ...]

    @classmethod
    def read(cls, arguments: Sequence[str]) -> Options:
        """What `arguments`, the environment and the file ask for.

        Raises:
            SetupError: something is not what it should be.
        """
        asked = ServeSettings.from_command_line(arguments, program="hotset serve")
        own_store, named = not asked.kvstore, "model" in asked.model_fields_set
        if named and not asked.model.is_dir():
            raise SetupError(
                f"--model {asked.model} is no directory; name one that holds a Hugging Face checkpoint"
            )
        if asked.store_args and not own_store:
            raise SetupError(
                f"--store-args are for a store that is started here, and --kvstore {asked.kvstore} names one "
                "that runs; leave one of them out"
            )
        if own_store and not asked.port:
            raise SetupError("--port 0 is no port that anybody could find; choose one from 1 to 65535")
        try:
            store_args = tuple(shlex.split(asked.store_args))
        except ValueError as error:
            raise SetupError(
                f"--store-args {asked.store_args} cannot be split into flags: {error}"
            ) from error
        return cls(
            host=asked.host,
            port=asked.port,
            model=str(asked.model) if named else "",
            served_name=asked.served_model_name,
            with_keys=bool(asked.api_keys),
            own_store=own_store,
            decoder_args=without_flag(arguments, "--store-args"),
            store_args=store_args,
        )

    @property
    def reachable_host(self) -> str:
        """An address at which this machine reaches the decoder."""
        return "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host  # compared, not bound


def without_flag(flags: Sequence[str], name: str) -> tuple[str, ...]:
    """`flags` without any `name value` or `name=value`."""
    kept: list[str] = []
    skip = False
    for flag in flags:
        if skip or flag == name:
            skip = not skip
        elif not flag.startswith(f"{name}="):
            kept.append(flag)
    return tuple(kept)

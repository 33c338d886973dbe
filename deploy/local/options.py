"""What `make run` was asked for: variables of make, and flags that go on to the services untouched.

Knows which flags the launcher itself must set, and refuses to have them set twice.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.local.family import Failure

_OURS = {
    "ARGS": {"--port": "PORT=", "--model": "MODEL=", "--kvstore": "nothing: `make run` starts its own"},
    "KVSTORE_ARGS": {},
}


@dataclass(frozen=True, slots=True)
class Options:
    """Read from the environment, where make puts its variables."""

    port: int
    model: str  # "" = the bundled one
    decoder_args: tuple[str, ...]
    kvstore_args: tuple[str, ...]

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Options:
        """The options that `environment` holds.

        Raises:
            Failure: a variable is not what it should be.
        """
        port = environment.get("PORT") or "8000"
        if not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise Failure(f"PORT={port} is no port; choose a number from 1 to 65535")
        model = environment.get("MODEL") or ""
        if model and not Path(model).is_dir():
            raise Failure(f"MODEL={model} is no directory; name one that holds a Hugging Face checkpoint")
        return cls(
            int(port),
            model,
            _flags("ARGS", environment.get("ARGS") or ""),
            _flags("KVSTORE_ARGS", environment.get("KVSTORE_ARGS") or ""),
        )

    @property
    def host(self) -> str:
        """The address that the decoder listens on."""
        return flag_value(self.decoder_args, "--host") or "127.0.0.1"

    @property
    def reachable_host(self) -> str:
        """An address at which this machine reaches it."""
        return "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host  # compared, not bound


def flag_value(flags: Sequence[str], name: str) -> str | None:
    """The last value of `--name value` or `--name=value` in `flags`."""
    found = None
    for number, flag in enumerate(flags):
        if flag == name and number + 1 < len(flags):
            found = flags[number + 1]
        elif flag.startswith(f"{name}="):
            found = flag.removeprefix(f"{name}=")
    return found


def _flags(variable: str, text: str) -> tuple[str, ...]:
    try:
        flags = tuple(shlex.split(text))
    except ValueError as error:
        raise Failure(f"{variable}={text} cannot be split into flags: {error}") from error
    for flag in flags:
        instead = _OURS[variable].get(flag.split("=")[0])
        if instead:
            raise Failure(f"{variable} may not hold {flag}; set {instead} instead")
    return flags

"""`python -m services.decoder`: the front, which starts its engines. Wiring, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

from services.contract.base_settings import exit_with
from services.contract.errors import SetupError
from services.contract.log import configure_logging
from services.decoder.front.server import run_front
from services.decoder.settings import DecoderSettings


def main() -> int:
    """Serve until a signal; returns the exit status."""
    arguments = sys.argv[1:]

    def engine_command(index: int, engine_socket: Path) -> list[str]:
        # The same flags; environment and file are inherited. The last of equal flags counts.
        program = [sys.executable, "-m", "services.decoder.engine"]
        own = (f"--engine-socket={engine_socket}", f"--engine-index={index}")
        return [*program, *arguments, *own, f"--device={settings.devices[index]}"]

    try:
        settings = DecoderSettings.from_command_line(arguments, program="services.decoder")
        configure_logging(settings.log_level)
        return run_front(settings, engine_command)
    except SetupError as error:
        exit_with(error)
    return 2


if __name__ == "__main__":
    sys.exit(main())

"""The front as a process, over the fake engine."""

from __future__ import annotations

import sys
from pathlib import Path

from services.contract.base_settings import exit_with
from services.contract.errors import SetupError
from services.contract.log import configure_logging
from services.decoder.front.server import run_front
from services.decoder.settings import DecoderSettings


def main() -> int:
    arguments = sys.argv[1:]

    def engine_command(index: int, socket: Path) -> list[str]:
        program = [sys.executable, "-m", "tests.front.fake_engine"]
        return [*program, *arguments, f"--engine-socket={socket}", f"--engine-index={index}"]

    try:
        settings = DecoderSettings.from_command_line(arguments, program="front")
        configure_logging(settings.log_level)
        return run_front(settings, engine_command)
    except SetupError as error:
        exit_with(error)
    return 2


if __name__ == "__main__":
    sys.exit(main())

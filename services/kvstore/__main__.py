"""`python -m services.kvstore`: settings in, exit status out."""

from __future__ import annotations

import asyncio
import sys

from services.contract.base_settings import exit_with
from services.contract.errors import SetupError
from services.contract.log import configure_logging
from services.kvstore.server import serve
from services.kvstore.settings import KvStoreSettings


def main() -> None:
    """Run until told to stop."""
    try:
        settings = KvStoreSettings.from_command_line(sys.argv[1:], program="services.kvstore")
        configure_logging(settings.log_level)
        asyncio.run(serve(settings))
    except SetupError as error:
        exit_with(error)


if __name__ == "__main__":
    main()

"""`python -m services.decoder.models.bundled [--cache-dir DIR]`: print the default model's directory.

Makes the checkpoint first if it is not there. Progress and errors go to standard error, so that
`MODEL=$(python -m services.decoder.models.bundled)` works.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from services.contract.errors import SetupError
from services.decoder.models.bundled.directory import default_cache_directory, default_model


def main() -> int:
    """Exit status: 0 made or found, 2 it cannot be, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m services.decoder.models.bundled", description=__doc__)
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=None,
        help=f"keeps the checkpoint (default: {default_cache_directory()})",
    )
    try:
        directory = default_model(parser.parse_args().cache_dir)
    except SetupError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; run it again to go on\n")
        return 130
    sys.stdout.write(f"{directory}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

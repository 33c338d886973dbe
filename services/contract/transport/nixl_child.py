"""`python -m services.contract.transport.nixl_child FILE TLS DEVICES LANES`: offers a file over nixl.

Started by nixl_responder.py. Prints the address in hex, or `error: ` and why there is none, and ends when
its standard input does, so with whoever started it. Knows the file's length and an agent; nothing of what
lies in it.
"""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

from services.contract.errors import SetupError
from services.contract.transport.checksum import load_checksum
from services.contract.transport.nixl_address import FarPlace, seal_place
from services.contract.transport.nixl_agent import NixlAgent
from services.contract.transport.ucx_worker import UcxOptions


def main() -> int:
    """Exit status: 0, or 2 where nothing can be offered."""
    path, tls, devices, lanes = sys.argv[1:]
    try:
        agent = NixlAgent(UcxOptions(tls=tls, devices=devices, lanes=lanes), serves=True)
        with Path(path).open("r+b") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0))
        place = FarPlace(agent.register(memory), len(memory), agent.metadata())
        said = seal_place(place, agent.version, load_checksum()).hex()
    except (OSError, ValueError, SetupError) as error:
        said = f"error: {error}"
    try:
        os.write(sys.stdout.fileno(), f"{said}\n".encode())
    except BrokenPipeError:
        return 0  # who started it has gone meanwhile
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody reads on
    if said.startswith("error"):
        return 2
    sys.stdin.read()
    agent.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

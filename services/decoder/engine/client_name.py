"""By what name an engine is known to its store. Knows settings and the machine's name; no session."""

from __future__ import annotations

import hashlib
import os
import re
import socket

from services.decoder.engine.settings import EngineSettings

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9.-]")
_LONGEST_MACHINE = 64  # Linux allows no longer one


def client_name(settings: EngineSettings) -> str:
    """The same in every life of this engine, and no other engine's of any decoder on the store.

    Whoever comes back under a name takes the place of who had it before: a remote session ends, a mapped one
    has to be gone. A server's machine and port are its own while it runs, and mostly when it runs again.
    One on any free port has nothing that lasts longer than itself: its own directory stands for the port.
    """
    machine = _NOT_IN_NAMES.sub("-", socket.gethostname())[:_LONGEST_MACHINE] or "localhost"
    front = str(settings.port)
    if not settings.port:
        directory = os.fsencode(settings.engine_socket.parent)
        front = hashlib.blake2b(directory, digest_size=4).hexdigest()
    return f"engine-{settings.engine_index}@{machine}:{front}"

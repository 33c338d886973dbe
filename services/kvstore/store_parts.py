"""What the data plane works on beside the store: by which rules, page_source.py and peers.py say.

Knows no rule itself.
"""

from __future__ import annotations

from typing import NamedTuple

from services.kvstore.arena import Arena
from services.kvstore.page_space import PageSpace
from services.kvstore.sessions import Sessions


class StoreParts(NamedTuple):
    """Of one store, for as long as it lives."""

    arena: Arena
    space: PageSpace
    sessions: Sessions

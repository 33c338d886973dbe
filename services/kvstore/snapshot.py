"""The store's figures at one moment, frozen, so that another thread may read them.

Knows no more than the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.kvstore.orders import ClientKind, PageCounts
from services.kvstore.sessions import SessionEnd


@dataclass(slots=True)
class StoreCounters:
    """What has happened since the process started; each only grows."""

    attaches: int = 0
    ended: dict[SessionEnd, int] = field(default_factory=lambda: dict.fromkeys(SessionEnd, 0))
    mapped_leases: int = 0  # leases of mapped clients that ended while the process lived
    allocated: int = 0  # pages
    sealed: int = 0  # pages
    refused: int = 0  # pages wanted and not there
    looked_up: int = 0  # hashes that decoders' matches named
    matched: int = 0  # pages that these found


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """What the store holds at one moment."""

    arena_path: str
    arena_bytes: int
    resident_bytes: int  # of the arena, in memory
    page_bytes: int  # 0 before the first attach, as are the pages
    page_tokens: int
    pages: PageCounts
    sessions: Mapping[ClientKind, int]
    expired_sessions: int  # mapped, past their lease, alive
    unclaimed_sessions: int  # mapped, alive since before the store's restart, not attached yet
    recovering: bool  # pages of an earlier life still wait for their clients
    draining: bool
    freed_pages: int  # that became free since the process started
    evicted_pages: int  # those of them that were cached
    counters: StoreCounters

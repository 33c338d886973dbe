"""What clients ask of the store and what it answers, free of the wire.

Knows only shapes and what makes an order impossible at any time; the store decides on the rest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from services.contract.errors import InvalidRequest
from services.contract.file_header import FileHeader
from services.kvstore.page_refs import PageRefs
from services.kvstore.seals import Seals

_TOKEN = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"[A-Za-z0-9._:@/-]{1,128}")
_FINGERPRINT_BYTES = 32
_PAGE_TOKENS = range(64, 2**20 + 1)
_HASH_BYTES = range(16, 33)


def check_hash_lengths(page_hashes: Sequence[bytes]) -> None:
    """Refuse what cannot be pages' hashes.

    Raises:
        InvalidRequest: one does not have 16 to 32 bytes.
    """
    for length in set(map(len, page_hashes)):
        if length not in _HASH_BYTES:
            raise InvalidRequest(f"a page hash has 16 to 32 bytes, not {length}")


def check_chain(page_hashes: Sequence[bytes]) -> None:
    """Refuse what cannot be the hashes of one sequence.

    Raises:
        InvalidRequest: one does not have 16 to 32 bytes, or stands there twice.
    """
    check_hash_lengths(page_hashes)
    if len(set(page_hashes)) != len(page_hashes):
        raise InvalidRequest("a page hash stands twice in one chain; chain each over all tokens before it")


def check_tokens(packed: bytes) -> None:
    """Refuse what cannot be token ids.

    Raises:
        InvalidRequest: one is cut.
    """
    if len(packed) % 4:
        raise InvalidRequest("token ids have 4 bytes each")


class ClientKind(Enum):
    """Whether a client can write the arena without asking."""

    MAPPED = "mapped"  # maps it: its pages come back when its process is gone
    REMOTE = "remote"  # never touches it: its pages come back when its lease ends


@dataclass(frozen=True, slots=True)
class AttachOrder:
    """Opens a session or takes one up again."""

    client_name: str
    kind: ClientKind
    token: str
    header: FileHeader
    held: PageRefs
    reads_only: bool = False  # refuse it rather than lay the arena out anew

    def check(self) -> None:
        """Refuse what no store could serve. The planes were checked as they were read.

        Raises:
            InvalidRequest: the name, token, fingerprint or page size is impossible.
        """
        if _NAME.fullmatch(self.client_name) is None:
            raise InvalidRequest("client_name must be 1 to 128 letters, digits or ._:@/-")
        if _TOKEN.fullmatch(self.token) is None:
            raise InvalidRequest("session_token must be 32 lower-case hex digits")
        if len(self.header.fingerprint) != _FINGERPRINT_BYTES:
            raise InvalidRequest(
                f"model_fingerprint must have {_FINGERPRINT_BYTES} bytes, not {len(self.header.fingerprint)}"
            )
        if self.header.page_tokens not in _PAGE_TOKENS:
            raise InvalidRequest(
                f"page_tokens must be {_PAGE_TOKENS.start} to {_PAGE_TOKENS.stop - 1}, "
                f"not {self.header.page_tokens}"
            )


@dataclass(frozen=True, slots=True)
class Attached:
    """Where the session's pages lie, and what its calls must say."""

    session_id: int
    epoch: int
    arena_path: str
    arena_bytes: int
    page_count: int
    lease_ms: int
    sealed: PageRefs  # those of the held pages that are sealed
    data_key: bytes  # what the session's requests for bytes must carry


@dataclass(frozen=True, slots=True)
class UpdateOrder:
    """One step's releases, then seals, then allocations."""

    sequence: int
    releases: PageRefs
    seals: Seals
    allocate_pages: int


@dataclass(frozen=True, slots=True)
class Updated:
    """What an update came to."""

    pages: PageRefs
    shortfall_pages: int
    free_pages: int
    cached_pages: int  # evictable: an allocation gets these as well


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state; the last four add up to the first."""

    total: int = 0
    free: int = 0
    open: int = 0
    sealed: int = 0
    cached: int = 0  # sealed and held by none

    @property
    def held(self) -> int:
        """Pages with a holder."""
        return self.open + self.sealed

"""What the settings come to on this machine, at start.

Knows figures and how a person reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.contract.byte_size import format_bytes
from services.contract.mount import mount_of
from services.kvstore.snapshot import StoreSnapshot


@dataclass(frozen=True, slots=True)
class StoreSizes:
    """What the settings come to on this machine, at start."""

    arena_path: Path
    arena_bytes: int
    resident_bytes: int  # of the arena, in memory already
    mount_free_bytes: int
    huge_pages: str  # the mount's option
    page_bytes: int  # 0 until the first attach lays the arena out
    page_count: int
    page_tokens: int
    held_pages: int  # found in a reopened arena

    @classmethod
    def of(cls, arena_path: Path, now: StoreSnapshot) -> Self:
        """Of a store that holds `now`."""
        mount = mount_of(arena_path)
        return cls(
            arena_path=arena_path,
            arena_bytes=now.arena_bytes,
            resident_bytes=now.resident_bytes,
            mount_free_bytes=mount.free_bytes,
            huge_pages=mount.huge,
            page_bytes=now.page_bytes,
            page_count=now.pages.total,
            page_tokens=now.page_tokens,
            held_pages=now.pages.held,
        )

    def table(self) -> str:
        """The sizes as lines for a person."""
        if self.page_count:
            pages = (
                f"{self.page_count} of {format_bytes(self.page_bytes)} and {self.page_tokens} tokens, "
                f"{self.page_count * self.page_tokens} tokens in all; {self.held_pages} held from before"
            )
        else:
            pages = "laid out by the first client's planes"
        rows = (
            ("arena", f"{self.arena_path}, {format_bytes(self.arena_bytes)}"),
            ("resident", f"{format_bytes(self.resident_bytes)} now, grows as pages are first written"),
            ("mount", f"{format_bytes(self.mount_free_bytes)} free, huge pages: {self.huge_pages}"),
            ("pages", pages),
        )
        return "\n".join(f"{name:<10}{value}" for name, value in rows)

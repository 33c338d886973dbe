"""What of pages a step being planned may still use, and who may try for them.

Knows numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Pages(NamedTuple):
    """Pages on either side: what somebody lacks, or what came free."""

    host: int
    device: int

    def and_each(self, rows: int) -> Pages:
        """And a page more of each kind for so many rows."""
        return Pages(self.host + rows, self.device + rows)


class Chances(NamedTuple):
    """What decides whether one that waits gets a row; more of any of it may be enough."""

    host_pages: int
    device_pages: int
    parcels: int  # of the hot buffer
    fewer_running: int  # negative: each of them may want a page soon
    victims: int
    prompts_sealed: int  # pages so far, that a match may find
    pages_laid: int  # device pages so far, that may be shared

    def exceed(self, refused: Chances | None) -> bool:
        """Whether trying again is worth a match."""
        return refused is None or any(now > then for now, then in zip(self, refused, strict=True))


@dataclass(slots=True)
class Room:
    """Free pages on either side."""

    host: int
    device: int

    def fits(self, need: Pages) -> bool:
        """Whether there is that much."""
        return need.host <= self.host and need.device <= self.device

    def spend(self, need: Pages) -> None:
        """Use it up."""
        self.host, self.device = self.host - need.host, self.device - need.device

    def gain(self, pages: Pages) -> None:
        """Pages that came free."""
        self.host, self.device = self.host + pages.host, self.device + pages.device

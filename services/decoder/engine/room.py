"""What of pages a step being planned may still use.

Knows two numbers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Room:
    """Free pages on either side; a need is (host pages, device pages)."""

    host: int
    device: int

    def fits(self, need: tuple[int, int]) -> bool:
        """Whether there is that much."""
        return need[0] <= self.host and need[1] <= self.device

    def spend(self, need: tuple[int, int]) -> None:
        """Use it up."""
        self.host, self.device = self.host - need[0], self.device - need[1]

    def gain(self, pages: tuple[int, int]) -> None:
        """Pages that came free."""
        self.host, self.device = self.host + pages[0], self.device + pages[1]

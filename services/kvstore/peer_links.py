"""The other stores that may be asked: those that the settings name, those that etcd tells of; and who rests.

Knows links and the clock; not what is asked.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from services.kvstore.peer_link import Dial, PeerLink

REST_SECONDS = 2.0
"""A peer that failed is left alone for so long."""


class PeerLinks:
    """Of one event loop."""

    def __init__(self, dial: Dial, named: Sequence[str]) -> None:
        """Links to the stores at the addresses `named`, which stay; others come and go by `follow`."""
        self._dial = dial
        self._named = tuple(named)
        self._links: dict[str, PeerLink] = {address: dial(address) for address in named}
        self._resting: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._links)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the stores that may be asked."""
        return tuple(self._links)

    def awake(self) -> list[PeerLink]:
        """Those that may be asked now, the named ones first."""
        now = time.monotonic()
        return [link for link in self._links.values() if self._resting.get(link.address, 0.0) < now]

    def rest(self, link: PeerLink) -> None:
        """Leave it alone for a while; it is out of reach, or refuses."""
        self._resting[link.address] = time.monotonic() + REST_SECONDS
        link.forget()

    async def follow(self, found: Iterable[str]) -> None:
        """Have links to the stores `found` and no others beside those named; while none of them is in use."""
        wanted = [*self._named, *found]
        gone = [link for address, link in self._links.items() if address not in wanted]
        self._links = {address: self._links.get(address) or self._dial(address) for address in wanted}
        self._resting = {address: until for address, until in self._resting.items() if address in wanted}
        for link in gone:
            await link.close()

    async def close(self) -> None:
        """Hang up."""
        for link in self._links.values():
            await link.close()

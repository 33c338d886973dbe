"""Device pages, and which of them hold what a sealed host page holds: rows with a common prefix share those.

Knows pages and hashes, not whose they are. A page that was found in the store is laid out when its row is let
in, before anything has loaded it; whoever is equipped first has it loaded, and the others find it there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from services.decoder.engine.host_pages import HostPage
from services.decoder.kv.device_pages import DevicePages


class ResidentPages:
    """Of one engine. A page is empty until it is loaded or written by its row."""

    def __init__(self, device: DevicePages, *, shared: bool = True) -> None:
        """Unless they are `shared`, each row has its own."""
        self.laid = 0  # pages so far, of what was found in the store, and again those that came beside steps
        self.loads_done = 0  # by steps and beside them, so far
        self._device = device
        self._shared = shared
        self._named: dict[bytes, tuple[HostPage, int]] = {}
        self._name_of: dict[int, bytes] = {}
        self._empty: set[int] = set()  # to be loaded by the next step that names them
        self._loading: set[int] = set()  # by a step that is not booked yet, or beside the steps
        self._beside: set[int] = set()  # of these, the latter

    @property
    def count(self) -> int:
        """All of them."""
        return self._device.count

    @property
    def free(self) -> int:
        """That nobody has."""
        return self._device.free

    def expected(self, hashes: Sequence[bytes]) -> int:
        """How many of the first pages of a chain lie there, if their host pages are found again."""
        count = 0
        while count < len(hashes) and hashes[count] in self._named:
            count += 1
        return count

    def share(self, hashes: Sequence[bytes], pages: Sequence[HostPage], *, waits: bool = False) -> list[int]:
        """Where the first of some sealed pages lie, as far as they do; a reference to each.

        Those that are loaded beside the steps are for who `waits` until they are there.
        """
        found = []
        for page_hash, page in zip(hashes, pages, strict=False):
            host, place = self._named.get(page_hash, (None, -1))
            if host != page or (place in self._beside and not waits):
                break
            found.append(place)
        self._device.share(found)
        return found

    def lay(self, hashes: Sequence[bytes], pages: Sequence[HostPage]) -> list[int]:
        """Take a page for each of some sealed ones, to be loaded from it, and let others share it."""
        taken = self.take(len(pages))
        self.laid += len(taken)
        self._empty.update(taken)
        if self._shared:
            for page_hash, page, place in zip(hashes, pages, taken, strict=True):
                self.name(page_hash, page, place)
        return taken

    def take(self, count: int) -> list[int]:
        """Pages for somebody alone."""
        taken = self._device.take(count)
        assert taken is not None, "the scheduler promised more device pages than there are"
        return taken

    def name(self, page_hash: bytes, page: HostPage, place: int) -> None:
        """A device page holds, or will, what a sealed page holds; the first that does is shared."""
        if self._shared and page_hash not in self._named and place not in self._name_of:
            self._named[page_hash] = page, place
            self._name_of[place] = page_hash

    def to_load(self, places: Sequence[int], *, beside: bool = False) -> set[int]:
        """Which the step being planned must load, and does: no other will, unless that one fails."""
        due = self._empty.intersection(places)
        self._empty -= due
        self._loading |= due
        if beside:
            self._beside |= due
        return due

    @property
    def lacks_bytes(self) -> bool:
        """Whether any page is to be loaded that no step or load has been told to."""
        return bool(self._empty)

    def loaded(self, places: Iterable[int]) -> None:
        """What loads them is over."""
        there = set(places)
        self.laid += len(self._beside & there)  # for those who did not wait for them
        self.loads_done += bool(there)
        for known in (self._loading, self._beside, self._empty):
            known -= there

    def is_loading(self, places: Sequence[int]) -> bool:
        """Whether any of them is being loaded."""
        return not self._loading.isdisjoint(places)

    def is_there(self, places: Sequence[int]) -> bool:
        """Whether all of them hold what they shall."""
        return self._empty.isdisjoint(places) and not self.is_loading(places)

    def forget_loads(self) -> None:
        """No step that was to load pages can be relied on."""
        self._empty |= self._loading
        self._loading.clear()
        self._beside.clear()

    def give_back(self, pages: Sequence[int]) -> int:
        """One reference less to each; how many are free now."""
        freed = self._device.give_back(list(pages))
        for place in freed:
            if page_hash := self._name_of.pop(place, b""):
                del self._named[page_hash]
        self._empty.difference_update(freed)
        self._loading.difference_update(freed)
        self._beside.difference_update(freed)
        return len(freed)

    def freed_by(self, pages: Iterable[int]) -> int:
        """How many would be free if these references were given back."""
        given = Counter(pages)
        return sum(self._device.references(place) == count for place, count in given.items())

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raise AssertionError unless rows hold, all together, the references that were given out."""
        self._device.check_integrity()
        references = Counter(held)
        assert all(references[place] == self._device.references(place) for place in range(self.count)), (
            "device pages lost or owned twice"
        )
        named = {place: page_hash for page_hash, (_, place) in self._named.items()}
        assert named == self._name_of, "device pages have other names than they are found by"
        assert {*named, *self._empty, *self._loading} <= set(references), "a page that nobody holds is known"

"""Who waits, who runs, and what each owns: rows, device pages, hot slots, host pages.

Knows counts and pages; who should run is the scheduler's decision. A sequence is in exactly one place:

    waiting    no row, no slots and no device pages; a parked one keeps its host pages, the others have none
    running    a row, and host and device pages for every token it has computed
    gone       nothing
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from services.decoder.engine.capacity_book import CapacityBook
from services.decoder.engine.limits import Limits
from services.decoder.engine.page_desk import PageDesk
from services.decoder.engine.room import Pages
from services.decoder.engine.sequence import Sequence
from services.decoder.kv.device_pages import DevicePages


class Roster:
    """Moves sequences between the places; both queues are most urgent first."""

    def __init__(self, limits: Limits, desk: PageDesk, device: DevicePages, hot: CapacityBook) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.parkings = 0  # rows taken from sequences that keep their host pages
        self.releases = 0  # sequences that lost their host pages, and must match and replay
        self.left_rows: list[int] = []  # since the last step
        self.hot = hot
        self._limits = limits
        self._desk = desk
        self._device = device
        self._free_rows = list(range(limits.max_rows - 1, -1, -1))
        self._arrivals = 0

    @property
    def free_rows(self) -> int:
        """Rows that nobody has."""
        return len(self._free_rows)

    @property
    def parked(self) -> list[Sequence]:
        """Those that wait with host pages, most urgent first."""
        return [sequence for sequence in self.waiting if sequence.is_parked]

    def enqueue(self, sequences: Iterable[Sequence]) -> None:
        """Let newcomers wait."""
        for sequence in sequences:
            sequence.arrival = self._arrivals
            self._arrivals += 1
            self._wait(sequence)

    def lacking(self, sequence: Sequence, tokens: int) -> Pages:
        """Pages that a sequence needs beside its own for so many tokens."""
        pages = -(-tokens // self._limits.page_tokens)
        return Pages(max(0, pages - len(sequence.host_pages)), max(0, pages - len(sequence.device_pages)))

    def seat(self, sequence: Sequence) -> None:
        """Give a waiting one a row; one that had a row before is sheltered for a page's worth of tokens."""
        self.waiting.remove(sequence)
        sequence.row = self._free_rows.pop()
        self.hot.admit(sequence.row, sequence.reach)
        if sequence.has_run:
            sequence.sheltered_until = sequence.computed + self._limits.page_tokens
        sequence.has_run = True
        sequence.refused, sequence.passed = None, 0
        insort(self.running, sequence, key=lambda seated: seated.rank)

    def park(self, sequence: Sequence) -> Pages:
        """Make a running one wait, with its host pages; what comes free. Nothing of it is lost."""
        self.parkings += 1
        freed = self._leave(sequence)
        self._wait(sequence)
        return freed

    def release(self, sequence: Sequence) -> Pages:
        """Take the host pages of a parked one; what comes free. It will match and replay."""
        self.releases += 1
        freed = self._desk.give(sequence.host_pages)
        sequence.host_pages = []
        sequence.rewind()
        return Pages(freed, 0)

    def retire(self, sequence: Sequence) -> None:
        """Let go of one that has ended, wherever it is; one that is gone is ignored."""
        if sequence.row is not None:
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._desk.give(sequence.host_pages)
        sequence.host_pages = []

    def check_integrity(self) -> None:
        """Raise AssertionError unless every row and page is owned as often as it was taken, or free."""
        rows = [sequence.row for sequence in self.running]
        assert None not in rows, "a running sequence has no row"
        assert sorted([*self._free_rows, *(row for row in rows if row is not None)]) == list(
            range(self._limits.max_rows)
        ), "rows lost or owned twice"
        assert all(s.row is None and not s.device_pages for s in self.waiting), "one that waits has a place"
        held = sum(len(sequence.device_pages) for sequence in self.running)
        assert held + self._device.free == self._device.count, "device pages lost"
        everyone = [*self.waiting, *self.running]
        for sequence in everyone:
            pages = len(sequence.host_pages)
            assert len(sequence.device_pages) in (pages, 0), "host and device pages differ"
            assert sequence.computed <= pages * self._limits.page_tokens, "computed tokens have no page"
        self._device.check_integrity()
        self.hot.check_integrity()
        self._desk.check_integrity(page for sequence in everyone for page in sequence.host_pages)

    def _wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda queued: queued.rank)

    def _leave(self, sequence: Sequence) -> Pages:
        """Take row and device pages from a running one."""
        assert sequence.row is not None
        self.running.remove(sequence)
        self._device.give_back(sequence.device_pages)
        self.hot.leave(sequence.row)
        freed = len(sequence.device_pages)
        self.left_rows.append(sequence.row)
        self._free_rows.append(sequence.row)
        sequence.row, sequence.device_pages = None, []
        return Pages(0, freed)

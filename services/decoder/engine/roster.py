"""Who waits, who runs, and what each owns: rows, device pages, hot slots, host pages.

Knows counts and pages; who should run is the scheduler's decision. A sequence is in exactly one place:

    waiting    no row, no slots and no device pages; a parked one keeps its host pages, the others have none
    running    a row, and host and device pages for every token it has computed
    arriving   the same, while pages that were found for it are loaded beside the steps, ended or not; for a
               step it may have a row and a place for these, and the rest of its pages in the next one
    lingering  the same, though it has ended: a step that names it is under way
    gone       nothing
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from services.decoder.engine.capacity_book import CapacityBook
from services.decoder.engine.host_pages import HostPage
from services.decoder.engine.limits import Limits
from services.decoder.engine.page_desk import PageDesk
from services.decoder.engine.resident_pages import ResidentPages
from services.decoder.engine.room import Pages
from services.decoder.engine.sequence import Sequence
from services.decoder.engine.step_plan import Arrival, NewPages, StepPlan

Needs = list[tuple[Sequence, int]]
"""Host pages that each sequence of a step lacks."""


class Roster:
    """Moves sequences between the places; both queues are most urgent first.

    What is free was named by no step that is under way.
    """

    def __init__(self, limits: Limits, desk: PageDesk, device: ResidentPages, hot: CapacityBook) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.arriving: list[Sequence] = []
        self.lingering: list[Sequence] = []
        self._seen_loads = 0  # by when `arrived` went through the arriving
        self.parkings = 0  # rows taken from sequences that keep their host pages
        self.releases = 0  # sequences that lost their host pages, and must match and replay
        self.left_rows: list[int] = []  # since the last step
        self.left_pages = 0  # host pages of those that left them because they had ended
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
        device = len(sequence.device_pages) + len(sequence.laid_pages)
        return Pages(max(0, pages - len(sequence.host_pages)), max(0, pages - device))

    @property
    def unequipped(self) -> list[Sequence]:
        """Arriving ones without pages for the rest of their prompts."""
        return [one for one in self.arriving if one.finish is None and not one.device_pages]

    def needs(self, plan: StepPlan) -> Needs:
        """Of everybody in a step."""
        return [(sequence, self.lacking(sequence, end).host) for sequence, end in plan.ends]

    def equip(self, plan: StepPlan, needs: Needs, pages: list[HostPage]) -> None:
        """Give a step's sequences what they lack, and let it take the rows back that were left.

        What was found for an arriving one begins to come once it has its other pages too.
        """
        plan.left_rows, self.left_rows, self.left_pages = self.left_rows, [], 0
        for sequence, count in needs:
            if not count and len(sequence.device_pages) == len(sequence.host_pages):
                continue
            assert sequence.row is not None
            sequence.host_pages += pages[:count]
            pages = pages[count:]
            first, laid = len(sequence.device_pages), sequence.laid_pages
            device = laid + self._device.take(len(sequence.host_pages) - first - len(laid))
            sequence.device_pages += device
            sequence.laid_pages = []
            host = [page.page for page in sequence.host_pages[first:]]
            plan.new_pages.append(NewPages(sequence.row, first, host, device))
            computed = -(-sequence.computed // self._limits.page_tokens) - first
            if sequence in plan.newcomers:
                plan.cached_tokens += sequence.cached
            elif computed > 0:  # found in the store, or kept while it was parked
                held = list(zip(host[:computed], device[:computed], strict=True))
                due = self._device.to_load(laid)
                plan.loads += [one for one in held[: len(laid)] if one[1] in due]
                plan.loads += held[len(laid) :]
                plan.cached_tokens += 0 if sequence.sheltered_until else sequence.cached

        if not self._device.lacks_bytes:
            return
        others = {place for one in self.running for place in one.laid_pages}  # loaded with their first tokens
        for sequence in self.arriving:
            waits = sequence.finish is None and sequence.device_pages
            found = self._found(sequence) if waits else []
            if due := self._device.to_load([place for place in found if place not in others], beside=True):
                pairs = zip((page.page for page in sequence.host_pages), found, strict=False)
                plan.arrivals.append(Arrival(sequence, [pair for pair in pairs if pair[1] in due]))

    def expect(self, sequence: Sequence) -> bool:
        """Let one that was just seated wait for what was found for it; False if that is there."""
        if self._device.is_there(sequence.laid_pages):
            return False
        self.running.remove(sequence)
        self.arriving.append(sequence)
        return True

    def arrived(self, arrivals: Iterable[Arrival]) -> list[Sequence]:
        """What was loaded is there; whoever waited for nothing else runs. Of these, who has ended since."""
        self._device.loaded(place for arrival in arrivals for _, place in arrival.loads)
        if self._device.loads_done == self._seen_loads and not any(one.finish for one in self.arriving):
            return []
        self._seen_loads = self._device.loads_done
        ended = []
        for sequence in list(self.arriving):
            found, has_ended = self._found(sequence), sequence.finish is not None
            if self._device.is_loading(found) or not (has_ended or self._device.is_there(found)):
                continue
            self.arriving.remove(sequence)
            insort(self.running, sequence, key=lambda seated: seated.rank)
            if has_ended:
                ended.append(sequence)
        return ended

    @staticmethod
    def _found(sequence: Sequence) -> list[int]:
        """Device pages of what the store had of an arriving one."""
        return sequence.places[: sequence.sealed]

    def share(self, sequence: Sequence, *, waits: bool = False) -> None:
        """Let one that waits have the device pages of what was found for it, where others have it there, or
        will have if it `waits` for that.
        """
        sealed = sequence.host_pages[: sequence.sealed]
        sequence.laid_pages = self._device.share(sequence.page_hashes, sealed, waits=waits)

    def unshare(self, sequence: Sequence) -> Pages:
        """It gets no row after all; what came free."""
        freed = self._device.give_back(sequence.laid_pages)
        sequence.laid_pages = []
        return Pages(0, freed)

    def name_pages(self, sequence: Sequence) -> None:
        """Let others share what it has sealed by now."""
        full = min(sequence.sealed, len(sequence.device_pages), len(sequence.page_hashes))
        for at in range(sequence.named, full):
            self._device.name(sequence.page_hashes[at], sequence.host_pages[at], sequence.device_pages[at])
        sequence.named = full

    def seat(self, sequence: Sequence) -> None:
        """Give a waiting one a row; one that had a row before is sheltered for a page's worth of tokens."""
        self.waiting.remove(sequence)
        sequence.row = self._free_rows.pop()
        first, sealed = len(sequence.laid_pages), sequence.sealed
        rest = slice(first, sealed)
        if first < sealed:
            sequence.laid_pages += self._device.lay(sequence.page_hashes[rest], sequence.host_pages[rest])
        sequence.named = sealed
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

    def linger(self, sequence: Sequence) -> None:
        """Take one that has ended from the running ones, with all that it has, until `settle`."""
        self.running.remove(sequence)
        self.lingering.append(sequence)

    def settle(self) -> None:
        """The step that named the lingering ones is over: let go of them."""
        for sequence in list(self.lingering):
            self.retire(sequence)

    def retire(self, sequence: Sequence) -> None:
        """Let go of one that has ended, wherever it is; one that is gone is ignored."""
        if sequence.row is not None:
            self._leave(sequence)
            self.left_pages += len(sequence.host_pages)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._desk.give(sequence.host_pages)
        sequence.host_pages = []

    def check_integrity(self) -> None:
        """Raise AssertionError unless every row and page is owned as often as it was taken, or free."""
        seated = [*self.running, *self.arriving, *self.lingering]
        rows = [sequence.row for sequence in seated]
        assert None not in rows, "a running sequence has no row"
        assert sorted([*self._free_rows, *(row for row in rows if row is not None)]) == list(
            range(self._limits.max_rows)
        ), "rows lost or owned twice"
        assert all(s.row is None and not s.places for s in self.waiting), "one that waits has a place"
        everyone = [*self.waiting, *seated]
        for sequence in everyone:
            pages = len(sequence.host_pages)
            assert len(sequence.device_pages) in (pages, 0), "host and device pages differ"
            assert sequence.computed <= pages * self._limits.page_tokens, "computed tokens have no page"
        self._device.check_integrity(page for sequence in seated for page in sequence.places)
        self.hot.check_integrity()
        self._desk.check_integrity(page for sequence in everyone for page in sequence.host_pages)

    def _wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda queued: queued.rank)

    def _leave(self, sequence: Sequence) -> Pages:
        """Take row and device pages from one that has them."""
        assert sequence.row is not None
        lists = (self.running, self.arriving, self.lingering)
        next(seated for seated in lists if sequence in seated).remove(sequence)
        freed = self._device.give_back(sequence.places)
        self.hot.leave(sequence.row)
        self.left_rows.append(sequence.row)
        self._free_rows.append(sequence.row)
        sequence.row, sequence.device_pages, sequence.laid_pages, sequence.named = None, [], [], 0
        return Pages(0, freed)

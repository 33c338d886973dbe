"""One lane's LRU in plain Python, word for word the definition of DESIGN section 4: the tests' oracle."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PlainLane:
    """`order` holds slots from stale to recent; `block_of` what each holds."""

    order: list[int]
    block_of: dict[int, int] = field(default_factory=dict)

    def slot_of(self, block: int) -> int | None:
        return next((slot for slot, held in self.block_of.items() if held == block), None)

    def step(
        self, selection: list[int], open_block: int
    ) -> tuple[list[int], int, list[tuple[int, int]], int, int]:
        """Slots of the selection, the open slot, fetches as (block, slot), hits, evictions."""
        chosen = list(dict.fromkeys(block for block in selection if block >= 0))
        open_had_slot = self.slot_of(open_block) is not None
        before = {block: self.slot_of(block) for block in {*chosen, open_block}}
        missing = [block for block in chosen if before[block] is None]
        if not open_had_slot and open_block not in missing:
            missing.append(open_block)
        rests = not missing and open_block + 1 <= len(
            self.order
        )  # nothing is missing, nothing can be evicted
        hit_slots = [slot for slot in self.order if slot in {before[b] for b in chosen}]
        open_slot = before[open_block]
        hits = [slot for slot in hit_slots if slot != open_slot]
        stale = [slot for slot in self.order if slot not in hit_slots and slot != open_slot]
        evictions = 0
        taken: list[int] = []
        for block in missing:
            victim = stale.pop(0)
            evictions += victim in self.block_of
            self.block_of[victim] = block
            taken.append(victim)
        opened = self.slot_of(open_block)
        assert opened is not None
        if not rests:
            self.order = [*stale, *(slot for slot in taken if slot != opened), *hits, opened]
        fetches = [(block, slot) for block, slot in zip(missing, taken, strict=True) if block != open_block]
        slots = [-1 if block < 0 else self._must(block) for block in selection]
        return slots, opened, fetches, len(chosen) - len(fetches), evictions

    def _must(self, block: int) -> int:
        slot = self.slot_of(block)
        assert slot is not None
        return slot

    def grow(self, count: int) -> None:
        self.order = [*range(len(self.order), len(self.order) + count), *self.order]

    def shrink(self, count: int) -> None:
        """Slots keep their numbers here; `renumber` follows whoever gives them others."""
        for slot in self.order[:count]:
            self.block_of.pop(slot, None)
        self.order = self.order[count:]

    def blocks(self) -> list[int | None]:
        """What the slots hold, from stale to recent, whatever their numbers."""
        return [self.block_of.get(slot) for slot in self.order]

    def renumber(self, order: list[int]) -> None:
        held = self.blocks()
        self.order = order
        self.block_of = {slot: block for slot, block in zip(order, held, strict=True) if block is not None}

"""`kv_mode=full`: every row's whole history on the device, in pages; the baseline and the oracle.

Knows no LRU and no hot buffer: a block's place is its page's place. The arena is written through as in
`tiered`, so that pages can be matched, moved and resumed in either mode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.decoder.kernels.append import append
from services.decoder.kernels.resolve import Counter
from services.decoder.kv.arena_map import ArenaMap
from services.decoder.kv.batch import DecodeBatch, PrefillChunk
from services.decoder.kv.history import gather_history
from services.decoder.kv.residence import Placement, SlotCount
from services.decoder.kv.shape import KvShape
from services.decoder.kv.write_through import write_through


class Full:
    """A Residence in which every chosen block is a hit."""

    def __init__(self, arena: ArenaMap, shape: KvShape, device_pages: int, device: torch.device) -> None:
        self._shape = shape
        self._arena = [arena.kv_blocks(layer) for layer in range(shape.layers)]
        blocks = device_pages * shape.groups * shape.blocks_per_page
        self._pools = [
            torch.zeros(blocks, shape.block_elements, dtype=shape.dtype, device=device)
            for _ in range(shape.layers)
        ]
        self.counters = torch.zeros(shape.layers, len(Counter), dtype=torch.int64)

    def seat(self, row: int, tokens: int) -> None:
        """Nothing to do: prefill wrote the pages."""

    def leave(self, row: int) -> None:
        """Nothing to do: the pages are the scheduler's to give back."""

    def resolve(self, layer: int, batch: DecodeBatch, selected: Tensor) -> Placement:
        """A look-up in the row's page table."""
        blocks = batch.device_blocks
        absent = selected < 0
        slots = blocks.gather(1, selected.long().clamp_min(0)).masked_fill_(absent, -1)
        open_slot = blocks.gather(1, batch.lane_open_block.unsqueeze(1)).squeeze(1)
        chosen = selected.numel() - int(torch.count_nonzero(absent))
        self.counters[layer, Counter.CHOSEN] += chosen
        self.counters[layer, Counter.HITS] += chosen
        return Placement(slots.int(), open_slot.int())

    def append(self, layer: int, batch: DecodeBatch, placement: Placement, records: Tensor) -> None:
        """Write the device's page and the arena's."""
        write_through(
            self._shape, batch, placement.open_slot, records, self._pools[layer], self._arena[layer]
        )

    def pool(self, layer: int) -> Tensor:
        """The layer's pages, as blocks."""
        shape = self._shape
        return self._pools[layer].view(-1, shape.block_tokens, 2, shape.heads, shape.head_dim)

    def write(self, layer: int, chunk: PrefillChunk, records: Tensor) -> None:
        """Prefill writes the device and the arena."""
        shape = self._shape
        pool = self._pools[layer].view(-1, shape.record_elements)
        tail = chunk.end % shape.block_tokens
        if tail:
            self._pools[layer][chunk.device_blocks[:, -1]] = 0  # the rest of the block was another's
        append(
            records,
            pool,
            chunk.device_records,
            self._arena[layer].view(-1, shape.record_elements),
            chunk.host_records,
        )

    def history(self, layer: int, chunk: PrefillChunk) -> tuple[Tensor, Tensor]:
        """From the device."""
        return gather_history(self._shape, self._pools[layer], chunk.device_blocks, chunk.start)

    def hot_slots(self) -> SlotCount:
        """There is no hot buffer."""
        return SlotCount(0, 0)

    def check_integrity(self) -> None:
        """Nothing that could disagree."""

"""What fits: device and host bytes of a number of rows of a length, in `full` and in `tiered`.

Every byte is counted by the engine's own memory plan; nothing is counted here but CUDA's share, and rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from services.contract.errors import SetupError
from services.contract.layout import ArenaLayout
from services.decoder.engine.hot_plan import parcel_bytes
from services.decoder.engine.memory_plan import MemoryPlan, kv_planes, kv_shape
from services.decoder.kv.shape import KvShape
from services.decoder.models.spec import ModelSpec
from services.decoder.settings import DecoderSettings

Mode = Literal["full", "tiered"]
MOST_ROWS = 1024
"""What the decoder's --max-rows takes."""
_GPU = torch.device("cuda")


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is, bytes."""

    gpu_bytes: int
    host_bytes: int  # that the arena may take
    cuda_bytes: int  # that CUDA itself, the kernels and their scratch memory take

    def usable(self, settings: DecoderSettings) -> int:
        """Of the GPU, by the engine: its share of the whole, less what CUDA takes of it."""
        return int(self.gpu_bytes * settings.device_memory_share) - self.cuda_bytes


@dataclass(frozen=True, slots=True)
class Fit:
    """One mode at one number of rows of one length."""

    mode: Mode
    rows: int
    context: int  # tokens
    parts: dict[str, int]  # device bytes by what they are for; the hot buffer's is its least
    device_bytes: int
    host_bytes: int
    usable_bytes: int
    card_bytes: int  # of the smallest card on which it would fit
    host_limit: int
    row_tokens: int  # that each row has on the device; of its context in full mode

    @property
    def fits(self) -> bool:
        """Whether the machine holds it."""
        return self.device_bytes <= self.usable_bytes and self.host_bytes <= self.host_limit


class Planner:
    """Asks the memory plan, again and again."""

    def __init__(
        self, settings: DecoderSettings, spec: ModelSpec, weight_bytes: int, machine: Machine
    ) -> None:
        self.settings = settings
        self.machine = machine
        self.shape: KvShape = kv_shape(settings, spec, torch.bfloat16)
        self._spec = spec
        self._weight_bytes = weight_bytes
        self._planes = kv_planes(settings, self.shape)

    def plan(self, mode: Mode, rows: int, context: int, room_bytes: int | None = None) -> MemoryPlan:
        """The engine's, over an arena in which every row has its pages.

        Raises:
            SetupError: the model does not reach that far, or not one row fits into `room_bytes`.
        """
        asked = {"kv_mode": mode, "max_rows": rows, "max_model_len": context, "device_cache_tokens": 0}
        settings = self.settings.model_copy(update=asked)
        layout = self.arena(rows, context)
        return MemoryPlan.derive(
            settings, self._spec, self.shape, layout, self._weight_bytes, _GPU, room_bytes
        )

    def arena(self, rows: int, context: int) -> ArenaLayout:
        """With the pages of every row, and the one ahead that each is given."""
        pages = rows * (self.shape.pages_for(context) + 1)
        layout = ArenaLayout(0, self.shape.page_tokens, self._planes, pages)
        return replace(layout, arena_bytes=layout.end)

    def fit(self, mode: Mode, rows: int, context: int) -> Fit:
        """What `rows` rows of `context` tokens take; errors as of `plan`."""
        plan = self.plan(mode, rows, context)
        bare = replace(plan, hot_classes=())  # the hot buffer's tables are counted with its slots
        least = sum(rows * each.floor * parcel_bytes(self.shape, each) for each in plan.hot_classes)
        parts = {
            "weights": plan.weight_bytes,
            "KV, resident": plan.resident_bytes,
            "hot slots, at least": least,
            "selector's index": plan.index_bytes,
            "page and block tables": bare.table_bytes,
            "prefill windows": plan.window_bytes,
            "sampling": plan.sampling_bytes,
        }
        needed = sum(parts.values())
        usable = self.machine.usable(self.settings)
        row_tokens = context
        if mode == "tiered":
            row_tokens = self._row_tokens(rows, context) if needed <= usable else 0
        return Fit(
            mode=mode,
            rows=rows,
            context=context,
            parts=parts,
            device_bytes=needed,
            host_bytes=plan.layout.arena_bytes,
            usable_bytes=usable,
            card_bytes=math.ceil((needed + self.machine.cuda_bytes) / self.settings.device_memory_share),
            host_limit=self.machine.host_bytes,
            row_tokens=row_tokens,
        )

    def most_rows(self, mode: Mode, context: int) -> int:
        """Rows of `context` tokens that fit; 0 if not one does."""
        return _largest(lambda rows: self.fit(mode, rows, context).fits, MOST_ROWS)

    def longest(self, mode: Mode, rows: int) -> int:
        """Tokens of the longest context of which `rows` fit, in whole pages; 0 if none does."""
        page = self.shape.page_tokens
        most = self._spec.max_positions // page
        return page * _largest(lambda pages: self.fit(mode, rows, pages * page).fits, most)

    def _row_tokens(self, rows: int, context: int) -> int:
        """Tokens that each row has hot slots for when all run, in the layers that choose."""
        room = self.machine.usable(self.settings) - self._weight_bytes
        classes = self.plan("tiered", rows, context, room).hot_classes
        last = classes[-1]
        parcels = min(last.most, last.parcels // rows)
        return min(context, parcels * last.parcel_slots * self.shape.block_tokens)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, where every smaller one does too; 0 if none."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        try:
            good = fits(middle)
        except SetupError:
            good = False
        low, high = (middle, high) if good else (low, middle)
    return low

"""What a decode step will take: bytes that the GPU reads, bytes that come over the link, the time of both.

Knows the figures of docs/speed.md, measured on one H200; every one of them can be replaced. A test compares
the result with the times measured there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from services.command.plan.fit import Fit, Mode
from services.command.plan.model import PlannedModel
from services.decoder.kv.shape import KvShape
from services.decoder.settings import DecoderSettings

DEVICE_GB_S = 4170.0
"""What a large copy on the device reads and writes (docs/speed.md, Decode)."""
OVER_FLOOR = 1.27
"""A step of `full` against the bytes that it must read at that speed, at any batch (the same table)."""
BOOKKEEPING_US = 5.0
"""Of resolve, a layer, where nothing is fetched (the same place)."""
MISS_RATE = 0.07
"""Of chosen blocks at twice the budget on real text, under Quest (the same place)."""
LINK_GB_S = ((1, 48.0), (4, 46.0), (8, 40.0), (16, 34.0), (40, 31.0))
"""GiB that one layer's records span in the arena -> what resolve's reads bring, PCIe 5 x16
(docs/records.md)."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of the machine and of the text; None = as measured, see above."""

    device_gb_s: float = DEVICE_GB_S
    link_gb_s: float | None = None
    miss_rate: float | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a step in which all rows decode."""

    mode: Mode
    rows: int
    row_tokens: int  # that each has on the device
    read_bytes: float  # on the device: weights, chosen KV, the selector's index
    miss_rate: float
    miss_bytes_per_token: float  # over the link
    link_gb_s: float
    device_ms: float
    link_ms: float

    @property
    def tpot_ms(self) -> float:
        """Time per output token: nothing hides the fetches."""
        return self.device_ms + self.link_ms

    @property
    def link_share(self) -> float:
        """Of that time, what is spent on fetches."""
        return self.link_ms / self.tpot_ms

    @property
    def tokens_per_s(self) -> float:
        """Of all rows."""
        return 1e3 * self.rows / self.tpot_ms


def cost_of(fit: Fit, model: PlannedModel, settings: DecoderSettings, shape: KvShape, speeds: Speeds) -> Cost:
    """The step of the rows of `fit`, each at its full length."""
    everything = settings.selector == "everything"
    dense = shape.layers if everything else settings.dense_layers
    sparse = shape.layers - dense
    chosen = min(settings.budget_tokens, fit.context)
    record = shape.groups * shape.record_elements * shape.record_dtype.itemsize
    row_kv = record * (sparse * chosen + dense * fit.context)
    row_index = fit.parts["selector's index"] / fit.rows
    read = model.read_bytes(fit.rows) + fit.rows * (row_kv + row_index)
    device_ms = 1e-6 * read / speeds.device_gb_s * OVER_FLOOR
    rate = missing(fit, speeds)
    misses = rate * record * sparse * chosen
    link = speeds.link_gb_s or link_speed(fit.host_bytes / shape.layers)
    if fit.mode == "tiered":
        device_ms += 1e-3 * BOOKKEEPING_US * shape.layers
    return Cost(
        mode=fit.mode,
        rows=fit.rows,
        row_tokens=fit.row_tokens,
        read_bytes=read,
        miss_rate=rate,
        miss_bytes_per_token=misses,
        link_gb_s=link,
        device_ms=device_ms,
        link_ms=1e-6 * fit.rows * misses / link,
    )


def missing(fit: Fit, speeds: Speeds) -> float:
    """The share of choices that miss: none where a row has slots for all that it is."""
    if fit.mode == "full" or fit.row_tokens >= fit.context:
        return 0.0
    return MISS_RATE if speeds.miss_rate is None else speeds.miss_rate


def link_speed(span_bytes: float) -> float:
    """GB/s where a layer's records span so much of the arena, between the measured points."""
    span = span_bytes / 2**30
    points = LINK_GB_S
    if span <= points[0][0]:
        return points[0][1]
    for (left, high), (right, low) in pairwise(points):
        if span <= right:
            return high + (low - high) * (span - left) / (right - left)
    return points[-1][1]

"""What memory goes where: the sizes that follow from the settings, the model and the arena.

Knows numbers; allocates nothing. Printed once at start.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch

from services.contract.byte_size import format_bytes
from services.contract.errors import SetupError
from services.contract.layout import ArenaLayout
from services.contract.planes import Plane
from services.decoder.engine.device_sampler import DeviceSampler
from services.decoder.engine.hot_plan import MOST_LANE_SLOTS, hot_classes
from services.decoder.kernels.choose_tokens import score_elements
from services.decoder.kv.hot_class import HotClass
from services.decoder.kv.shape import KvShape
from services.decoder.models.spec import ModelSpec
from services.decoder.settings import DecoderSettings

RECORD_FORMAT = b"gqa-kv-1"
"""Changes whenever the bytes of docs/records.md do, so that no store serves the old ones."""


def kv_shape(settings: DecoderSettings, spec: ModelSpec, dtype: torch.dtype) -> KvShape:
    """Sizes of records, blocks and pages."""
    shared = settings.selector == "quest" and settings.quest_sharing == "layer"
    latent, blocks = spec.latent, spec.blocks
    own_index = latent.index_dim if latent else blocks.entry_elements if blocks else 0
    return KvShape(
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        groups=1 if shared else spec.kv_heads,
        block_tokens=settings.block_tokens,
        page_tokens=settings.page_tokens,
        dtype=dtype,
        latent=latent.latent if latent else 0,
        index_dim=own_index,
        index_coded=latent is not None and settings.index_dtype == "float8",
        record_coded=latent is not None and settings.record_dtype == "float8",
        anchors=latent.anchors if latent else (),
    )


def kv_planes(settings: DecoderSettings, shape: KvShape) -> tuple[Plane, ...]:
    """What the arena keeps of every page."""
    return shape.planes(with_index=settings.selector != "everything")


def kv_fingerprint(spec: ModelSpec, shape: KvShape) -> bytes:
    """32 bytes that differ whenever KV bytes of one run would mean something else in another."""
    digest = hashlib.blake2b(spec.weights_digest, digest_size=32)
    digest.update(RECORD_FORMAT)
    digest.update(repr(shape).encode())
    return digest.digest()


def device_room(settings: DecoderSettings, device: torch.device) -> int | None:
    """Bytes that the engine may still take of a GPU's memory; None where nothing limits it, on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + cached - total * (1 - settings.device_memory_share))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Derived once, after the attach; build it with `derive`."""

    settings: DecoderSettings
    shape: KvShape
    layout: ArenaLayout
    max_model_len: int  # tokens
    device_pages: int
    sparse_layers: int  # in which not everything is read: those behind the dense ones, unless all are
    weight_bytes: int
    sampling_bytes: int  # the device sampler's tables; on the CPU there are none
    score_bytes: int  # room for an indexer's scores; on the CPU they come and go
    step_tokens: int  # a step computes at most, prefill included
    window_bytes: int  # what prefill reads its history through
    hot_classes: tuple[HotClass, ...]  # of the hot buffer, in the order of their layers; none in full mode

    @classmethod
    def derive(
        cls,
        settings: DecoderSettings,
        spec: ModelSpec,
        shape: KvShape,
        layout: ArenaLayout,
        weight_bytes: int,
        device: torch.device,
        room_bytes: int | None = None,
        lane_slots: int = MOST_LANE_SLOTS,
    ) -> MemoryPlan:
        """Reconcile what was asked with what there is.

        Args:
            settings: what was asked.
            spec: the model's.
            shape: of records, blocks and pages.
            layout: the arena's.
            weight_bytes: of the loaded model.
            device: that decodes.
            room_bytes: device memory that the engine may still take; None = no limit is known (a CPU).
            lane_slots: hot slots that the device can order in a lane.

        Raises:
            SetupError: a length that the model, the arena or the device cache cannot hold, a hot buffer too
                small for one row, or more device memory than there is.
        """
        asked = settings.max_model_len
        if asked > spec.max_positions:
            raise SetupError(f"--max-model-len {asked} exceeds the model's {spec.max_positions} positions")
        arena_tokens = layout.page_count * shape.page_tokens
        longest = min(asked or spec.max_positions, arena_tokens)
        if asked > arena_tokens:
            raise SetupError(
                f"--max-model-len {asked} exceeds the {arena_tokens} tokens that the arena holds "
                f"({format_bytes(layout.arena_bytes)}); start kvstore with a larger --arena-bytes"
            )
        cached = settings.device_cache_tokens
        if cached and cached < longest:
            raise SetupError(
                f"--device-cache-tokens {cached} is less than one request of {longest} tokens; "
                "raise it, or lower --max-model-len"
            )
        if settings.dense_layers > spec.layers:
            raise SetupError(f"--dense-layers {settings.dense_layers}: the model has {spec.layers} layers")
        plan = cls(
            settings=settings,
            shape=shape,
            layout=layout,
            max_model_len=longest,
            device_pages=shape.pages_for(cached) if cached else settings.max_rows * shape.pages_for(longest),
            sparse_layers=0 if settings.selector == "everything" else spec.layers - settings.dense_layers,
            weight_bytes=weight_bytes,
            sampling_bytes=DeviceSampler.device_bytes(settings.max_rows, spec.vocab_size)
            if device.type == "cuda"
            else 0,
            score_bytes=_score_bytes(settings, spec, shape, shape.pages_for(longest), device),
            step_tokens=settings.step_tokens(device.type),
            window_bytes=_window_bytes(settings, shape, device),
            hot_classes=(),
        )
        if room_bytes is not None:
            room_bytes -= plan.index_bytes + plan.table_bytes + plan.window_bytes
            room_bytes -= plan.sampling_bytes + plan.score_bytes
        if settings.kv_mode == "tiered":
            classes = hot_classes(
                settings, shape, plan.sparse_layers, plan.max_blocks, room_bytes, lane_slots
            )
            return replace(plan, hot_classes=classes)
        if room_bytes is not None and plan.resident_bytes > room_bytes:
            raise SetupError(
                f"KV of {plan.device_pages * shape.page_tokens:,} tokens takes "
                f"{format_bytes(plan.resident_bytes)} on the device, which has "
                f"{format_bytes(max(0, room_bytes))} left for it; lower --device-cache-tokens (a request of "
                f"{longest} tokens must fit) or --max-model-len, raise --device-memory-share, or run with "
                "--kv-mode tiered"
            )
        return plan

    @property
    def max_pages(self) -> int:
        """Pages of the longest row."""
        return self.shape.pages_for(self.max_model_len)

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest lane."""
        return self.max_pages * self.shape.blocks_per_page

    @property
    def top_k(self) -> int:
        """Blocks a layer chooses for a lane at most."""
        return self.settings.budget_tokens // self.shape.block_tokens

    @property
    def hot_bytes(self) -> int:
        """The hot buffer, all rows and layers; none in full mode."""
        slots = sum(each.layers * each.pool_slots(self.shape.groups) for each in self.hot_classes)
        return slots * self.shape.block_bytes

    @property
    def resident_bytes(self) -> int:
        """KV of all device pages in full mode."""
        if self.settings.kv_mode == "tiered":
            return 0
        return self.device_pages * self.shape.page_tokens * self.token_bytes

    @property
    def index_bytes(self) -> int:
        """The selector's index."""
        page_bytes = self.shape.index_elements * self.shape.entry_dtype.itemsize
        return len(self.index_layers) * self.device_pages * page_bytes

    @property
    def index_layers(self) -> list[int]:
        """The layers that have an index."""
        layers = range(self.shape.layers - self.sparse_layers, self.shape.layers)
        return [layer for layer in layers if self.shape.chooses(layer)]

    @property
    def token_bytes(self) -> int:
        """KV of one token, all layers."""
        shape = self.shape
        return shape.layers * shape.groups * shape.record_elements * shape.record_dtype.itemsize

    @property
    def table_bytes(self) -> int:
        """Tables of rows, lanes and hot slots, int32."""
        rows, groups = self.settings.max_rows, self.shape.groups
        entries = rows * 2 * self.max_pages
        if self.settings.kv_mode == "tiered":
            tables = sum(self.shape.chooses(layer) for layer in range(self.shape.layers))
            entries += rows * groups * self.max_blocks * tables
        for each in self.hot_classes:
            entries += 2 * (each.layers - each.followers) * each.pool_slots(groups) + rows * (each.most + 1)
        return 4 * entries

    def table(self) -> str:
        """The plan for people; what takes nothing is not in it."""
        device_tokens = self.device_pages * self.shape.page_tokens
        arena_tokens = self.layout.page_count * self.shape.page_tokens
        pages = self.layout.page_count
        lines = [
            ("weights", self.weight_bytes, str(self.shape.dtype).removeprefix("torch.")),
            ("hot buffer", self.hot_bytes, self._hot_note()),
            ("resident KV", self.resident_bytes, f"kv_mode {self.settings.kv_mode}"),
            ("selector's index", self.index_bytes, f"{device_tokens:,} tokens"),
            ("tables", self.table_bytes, f"{self.max_model_len:,} tokens a row at most"),
            ("prefill windows", self.window_bytes, f"{self.settings.whole_window_tokens:,} tokens each"),
            ("indexer's scores", self.score_bytes, "of all rows, or a part of a prompt"),
            ("sampling", self.sampling_bytes, "wishes and token counts"),
            ("arena (host)", self.layout.arena_bytes, f"{pages:,} pages, {arena_tokens:,} tokens"),
            ("KV of a token", self.token_bytes, self._record_note()),
        ]
        return "\n".join(
            f"  {name:<17}{format_bytes(size):>10}  {note}" for name, size, note in lines if size
        )

    def _record_note(self) -> str:
        """How often a token leaves a record, and whether that is not all that there was."""
        shape = self.shape
        coded = f", records of {shape.block_bytes:,} bytes in float8: NOT EXACT" if shape.record_coded else ""
        return f"{shape.layers} layers, {shape.groups} groups{coded}"

    def _hot_note(self) -> str:
        """What the last class of layers, the sparse ones, holds: tokens of all rows, and of one."""
        if not self.hot_classes:
            return ""
        last, block_tokens = self.hot_classes[-1], self.shape.block_tokens
        total, least, most = (
            parcels * last.parcel_slots * block_tokens for parcels in (last.parcels, last.floor, last.most)
        )
        return f"{total:,} tokens; a row {least:,} to {most:,}"


def _score_bytes(
    settings: DecoderSettings, spec: ModelSpec, shape: KvShape, pages: int, device: torch.device
) -> int:
    """Room for the scores of a model that chooses by itself: of tokens, or of the blocks of each group.

    NSA's come with a copy of all rows' entries, over the longest row, in float32 (attend_entries.py).
    """
    if device.type != "cuda" or not shape.index_dim:
        return 0
    rows = settings.max_rows
    scores = 4 * score_elements(rows * shape.groups, pages * shape.blocks_per_page)
    if settings.selector != "nsa":
        return scores
    elements = rows * pages * shape.index_elements
    entries = elements // (2 * shape.kv_heads * shape.head_dim)
    # As they lie, in float32, and the values without those that are not seen; the shares of every query head,
    # and two steps on the way to them.
    return scores + elements * (shape.entry_dtype.itemsize + 4 + 2) + entries * spec.query_heads * 3 * 4


def _window_bytes(settings: DecoderSettings, shape: KvShape, device: torch.device) -> int:
    """A window of one layer that attention reads; on a GPU two more in tiered mode, which copies from the
    arena fill meanwhile, and two quarters of one on the way back.
    """
    one = (
        settings.whole_window_tokens // shape.page_tokens * shape.page_elements * shape.record_dtype.itemsize
    )
    if device.type != "cuda":
        return one
    return one * (3 if settings.kv_mode == "tiered" else 1) + one // 2

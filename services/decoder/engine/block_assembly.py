"""Puts the heart of a model together that chooses blocks by itself.

Knows its parts by their constructors; the runner around them is assembly.py's.
"""

from __future__ import annotations

import torch

from services.decoder.attention.block_heart import BlockHeart
from services.decoder.attention.block_index import BlockIndex
from services.decoder.attention.block_selector import BlockSelector
from services.decoder.attention.everything import Everything
from services.decoder.attention.nsa import Nsa
from services.decoder.attention.recorder import RecordedBlocks
from services.decoder.attention.selection_file import SelectionWriter
from services.decoder.engine.memory_plan import MemoryPlan
from services.decoder.kernels.block_kernels import BlockKernels
from services.decoder.kernels.block_twins import BlockTwins
from services.decoder.kernels.step_kernels import StepKernels
from services.decoder.kv.arena_map import ArenaMap
from services.decoder.kv.paged_index import Entries, PagedIndex
from services.decoder.kv.remote_arena import RemoteArena
from services.decoder.kv.residence import Residence
from services.decoder.kv.shape import KvShape
from services.decoder.models.block_spec import BlockSpec


def block_kernels_of(plan: MemoryPlan, spec: BlockSpec | None, device: torch.device) -> BlockKernels | None:
    """What computes such choices there, and attention over them; None for a model that makes none."""
    if spec is None:
        return None
    if device.type != "cuda":
        return BlockTwins()
    from services.decoder.kernels.gpu.block_kernels import GpuBlockKernels  # needs the gpu extra

    return GpuBlockKernels(plan.settings.max_rows, plan.max_blocks, plan.shape.groups, device)


def block_heart(
    plan: MemoryPlan,
    spec: BlockSpec,
    arena: ArenaMap | RemoteArena,
    kernels: StepKernels,
    block_kernels: BlockKernels,
    residence: Residence,
    writer: SelectionWriter | None,
    device: torch.device,
) -> tuple[BlockHeart, PagedIndex]:
    """The heart and the index that its selectors stand on; choices go to `writer`, if there is one."""
    shape = plan.shape
    index = PagedIndex(kernels, arena, shape, plan.device_pages, plan.index_layers, device)
    choosing = {
        layer: _selector(spec, block_kernels, shape, index.entries(layer)) for layer in plan.index_layers
    }
    if writer is not None:
        choosing = {layer: RecordedBlocks(own, layer, writer) for layer, own in choosing.items()}
    dense = [Everything() for _ in range(shape.layers)]
    heart = BlockHeart(kernels, block_kernels, shape, residence, dense, choosing, spec.window_tokens)
    return heart, index


def _selector(spec: BlockSpec, kernels: BlockKernels, shape: KvShape, entries: Entries) -> BlockSelector:
    if spec.selector == "nsa":
        return Nsa(kernels, entries, shape, spec.top_k, spec.compress_tokens)
    return BlockIndex(kernels, entries, shape, spec.top_k)

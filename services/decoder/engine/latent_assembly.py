"""The heart of a model that chooses single tokens by an indexer of its own, put together from a plan.

Knows those parts by their constructors; the rest of a runner is assembly.py's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from services.decoder.attention.dsa import Dsa
from services.decoder.attention.latent_heart import LatentHeart
from services.decoder.attention.recorder import RecordedTokens
from services.decoder.attention.selection_file import SelectionWriter
from services.decoder.attention.selector import TokenSelector
from services.decoder.engine.memory_plan import MemoryPlan
from services.decoder.kernels.index_code import hadamard
from services.decoder.kernels.latent_kernels import LatentKernels
from services.decoder.kernels.latent_twins import LatentTwins
from services.decoder.kernels.step_kernels import StepKernels
from services.decoder.kv.arena_map import ArenaMap
from services.decoder.kv.paged_index import PagedIndex
from services.decoder.kv.remote_arena import RemoteArena
from services.decoder.kv.residence import Residence
from services.decoder.models.causal_lm import CausalLM

WrapTokens = Callable[[int, TokenSelector], TokenSelector]


def latent_kernels_of(plan: MemoryPlan, model: CausalLM, device: torch.device) -> LatentKernels | None:
    """What computes choices and attention over latent records there; None for a model of other records."""
    if model.spec.latent is None:
        return None
    if device.type != "cuda":
        return LatentTwins()
    from services.decoder.kernels.gpu.latent_kernels import GpuLatentKernels  # needs the gpu extra

    longest = plan.max_pages * plan.shape.page_tokens
    return GpuLatentKernels(plan.settings.max_rows, longest, model.spec.query_heads, device)


def latent_heart(
    plan: MemoryPlan,
    arena: ArenaMap | RemoteArena,
    device: torch.device,
    kernels: StepKernels,
    latent_kernels: LatentKernels,
    residence: Residence,
    writer: SelectionWriter | None,
    wrap: WrapTokens,
) -> tuple[PagedIndex, LatentHeart]:
    """The index that its selectors stand on, and the heart; choices go to `writer`, if there is one."""
    shape = plan.shape
    index = PagedIndex(kernels, arena, shape, plan.device_pages, plan.index_layers, device)
    rotation = hadamard(shape.index_dim, device) if shape.index_coded else None
    choosing = {
        layer: wrap(layer, Dsa(latent_kernels, index.entries(layer), shape.page_tokens, plan.top_k, rotation))
        for layer in plan.index_layers
    }
    if writer is not None:
        choosing = {layer: RecordedTokens(own, layer, writer) for layer, own in choosing.items()}
    return index, LatentHeart(kernels, latent_kernels, shape, residence, choosing)

"""What the first prompt would wait for on a GPU, before there is one: kernels to compile, attention to plan.

Knows which launches a chunk makes, and makes them over zeros of its own.
"""

from __future__ import annotations

import torch

from services.decoder.engine.memory_plan import MemoryPlan
from services.decoder.kernels.attend_masked import Sight
from services.decoder.kernels.attend_part import attend_part
from services.decoder.kernels.block_kernels import BlockKernels
from services.decoder.kernels.choose_tokens import IndexQuery
from services.decoder.kernels.index_code import code_keys, code_query, hadamard
from services.decoder.kernels.latent_kernels import LatentKernels
from services.decoder.kernels.step_kernels import StepKernels
from services.decoder.models.spec import ModelSpec


def warm_up(
    plan: MemoryPlan,
    spec: ModelSpec,
    kernels: StepKernels,
    latent_kernels: LatentKernels | None,
    block_kernels: BlockKernels | None,
    device: torch.device,
) -> None:
    """All that a prompt needs of a model like this."""
    warm_up_loads(plan, kernels, device)
    if latent_kernels is not None:
        warm_up_latent_prefill(plan, kernels, latent_kernels, spec, device)
    else:
        warm_up_prefill(plan, kernels, spec.query_heads, device)
    if block_kernels is not None:
        warm_up_block_prefill(plan, kernels, block_kernels, spec, device)


@torch.inference_mode()
def warm_up_loads(plan: MemoryPlan, kernels: StepKernels, device: torch.device) -> None:
    """What brings a found page: its index, and in full mode its KV."""
    shape = plan.shape
    page = torch.zeros(1, shape.index_elements, dtype=shape.entry_dtype, device=device)
    pages = [page] if plan.index_layers else []
    if plan.settings.kv_mode == "full":
        pages.append(torch.zeros(1, shape.page_elements, dtype=shape.record_dtype, device=device))
    for page in pages:
        kernels.load_pages([page], [page], torch.zeros(2, 1, dtype=torch.int64, device=device))


@torch.inference_mode()
def warm_up_prefill(plan: MemoryPlan, kernels: StepKernels, query_heads: int, device: torch.device) -> None:
    """A chunk of a step, at most a window, over a full window in one layer; its memory is free afterwards."""
    shape, window = plan.shape, plan.settings.whole_window_tokens
    tokens = min(plan.step_tokens, window)
    query = torch.zeros(tokens, query_heads, shape.head_dim, dtype=shape.dtype, device=device)
    key = query[:, : shape.kv_heads].contiguous()
    pages = torch.zeros(shape.pages_for(len(key)), dtype=torch.int32, device=device)
    page = torch.zeros(shape.page_elements, dtype=shape.dtype, device=device)
    target = shape.as_pages(page)
    kernels.write_run(key, key, target, pages, 0)
    gathered = query.new_zeros(shape.groups, shape.page_tokens, shape.record_elements)
    kernels.gather_pages(target, pages[:1], gathered)
    if not shape.index_dim:
        blocks = torch.zeros(-(-len(key) // shape.block_tokens), dtype=torch.int64, device=device)
        bounds = key.new_zeros(1, shape.kv_heads, 2 * shape.head_dim)
        kernels.fill_bounds(bounds, key, blocks, shape.block_tokens)
    own = attend_part(query, key, key, 1.0, causal=True)
    seen = query.new_zeros(window, shape.kv_heads, shape.head_dim)
    earlier = attend_part(query, seen, seen, 1.0, causal=False)
    for out in (torch.float32, query.dtype):
        kernels.merge_parts(kernels.merge_parts(earlier, own, torch.float32), own, out)
        kernels.merge_parts(earlier, own, out)


@torch.inference_mode()
def warm_up_latent_prefill(
    plan: MemoryPlan,
    kernels: StepKernels,
    latent_kernels: LatentKernels,
    spec: ModelSpec,
    device: torch.device,
) -> None:
    """The kernels of a chunk in a layer that chooses, over a few tokens: nothing is planned by length."""
    shape, latent = plan.shape, spec.latent
    assert latent is not None
    page = torch.zeros(shape.page_elements, dtype=shape.record_dtype, device=device)
    target, pages = shape.as_pages(page), torch.zeros(1, dtype=torch.int32, device=device)
    record = torch.zeros(2, shape.head_dim, dtype=shape.dtype, device=device)
    kept = latent_kernels.code(record, latent.latent) if shape.record_coded else record
    key = kept.unsqueeze(1)
    kernels.write_run(key, key[..., :0], target, pages, 0)
    gathered = kept.new_zeros(shape.groups, shape.page_tokens, shape.record_elements)
    kernels.gather_pages(target, pages, gathered)
    keys = record.new_zeros(shape.page_tokens, shape.index_dim)
    tokens, heads = plan.top_k + 1, spec.config.index_n_heads
    index = IndexQuery(
        record.new_zeros(tokens, heads, shape.index_dim), torch.zeros(tokens, heads, device=device)
    )
    if shape.index_coded:
        rotation = hadamard(shape.index_dim, device)
        keys, index = code_keys(keys, rotation), IndexQuery(*code_query(*index, rotation))
    many = pages.expand(shape.pages_for(tokens)).contiguous()
    latent_kernels.rank(many, shape.page_tokens, 0, keys, index, plan.top_k)
    query = record.new_zeros(2, spec.query_heads, shape.head_dim)
    chosen = torch.zeros(2, plan.top_k, dtype=torch.int32, device=device)
    part = latent_kernels.attend_chosen(query, kept, chosen, 1.0, latent.latent)
    for out in (torch.float32, query.dtype):
        kernels.merge_parts(kernels.merge_parts(part, part, torch.float32), part, out)
        kernels.merge_parts(part, part, out)


@torch.inference_mode()
def warm_up_block_prefill(
    plan: MemoryPlan, kernels: StepKernels, block_kernels: BlockKernels, spec: ModelSpec, device: torch.device
) -> None:
    """What a chunk launches in a layer that chooses blocks, beside dense prefill's, over a few tokens."""
    shape, blocks = plan.shape, spec.blocks
    assert blocks is not None
    if blocks.selector == "block_index":
        key = (1, shape.blocks_per_page, shape.block_tokens, shape.index_dim // shape.block_tokens)
        keys = torch.zeros(key, dtype=shape.dtype, device=device)
        start = blocks.top_k * shape.block_tokens
        pages = torch.zeros(shape.pages_for(start + 1), dtype=torch.int32, device=device)
        block_kernels.rank(pages, start, keys, keys.new_zeros(1, shape.groups, key[3]), blocks.top_k)
    most = torch.zeros(plan.step_tokens, spec.query_heads, shape.head_dim, dtype=shape.dtype, device=device)
    # How many tokens a chunk has decides which variant attends.
    for tokens in [*(2**n for n in range(plan.step_tokens.bit_length())), plan.step_tokens]:
        query = most[:tokens]
        own = query.new_zeros(tokens, shape.kv_heads, shape.head_dim)
        chosen = torch.zeros(tokens, shape.groups, blocks.top_k, dtype=torch.int32, device=device)
        for window in {0, blocks.window_tokens}:
            sight = Sight(0, chosen, shape.block_tokens, window)
            part = block_kernels.attend_chosen(query, own, own, 0, sight, 1.0)
        for out in (torch.float32, query.dtype):
            kernels.merge_parts(kernels.merge_parts(part, part, torch.float32), part, out)
            kernels.merge_parts(part, part, out)

"""What the first prompt would wait for on a GPU, before there is one: kernels to compile, attention to plan.

Knows which launches a chunk makes, and makes them over zeros of its own.
"""

from __future__ import annotations

import torch

from services.decoder.engine.memory_plan import MemoryPlan
from services.decoder.kernels.attend_part import attend_part
from services.decoder.kernels.step_kernels import StepKernels


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
    blocks = torch.zeros(-(-len(key) // shape.block_tokens), dtype=torch.int64, device=device)
    kernels.fill_bounds(key.new_zeros(1, shape.kv_heads, 2 * shape.head_dim), key, blocks, shape.block_tokens)
    own = attend_part(query, key, key, 1.0, causal=True)
    seen = query.new_zeros(window, shape.kv_heads, shape.head_dim)
    earlier = attend_part(query, seen, seen, 1.0, causal=False)
    for out in (torch.float32, query.dtype):
        kernels.merge_parts(kernels.merge_parts(earlier, own, torch.float32), own, out)
        kernels.merge_parts(earlier, own, out)

"""How long a MiniMax-M3 layer chooses and attends on a GPU: launches in one graph over several layers' keys.

    python -m benchmarks.choose_blocks

Its shapes, bf16: decode's choice (scores of blocks and their top-k) beside the time of the index keys' bytes,
decode's attention over what was chosen, and a prompt's chunk: its choice, and its attention over one window.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks import report
from benchmarks.choose import BYTES_A_SECOND, graph_us, normal
from benchmarks.gpu_timing import seconds_of
from services.decoder.kernels.attend_masked import Sight
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.gpu.block_kernels import GpuBlockKernels
from services.decoder.kernels.gpu.step_kernels import GpuKernels

HEADS, GROUPS, HEAD_DIM, DIM, BLOCK, TOP_K = 64, 4, 128, 128, 128, 16  # a page is a block
DECODE = ((1, 8192), (1, 32768), (1, 163840), (8, 32768), (8, 163840), (32, 32768))
CHUNKS = ((4096, 4096), (4096, 32768), (2048, 163840))  # tokens of a prompt's chunk that ends at this context
WINDOW = 16384
_KEY_BYTES = 2**30  # of different layers' keys in a graph: more than a cache holds
_CUDA = torch.device("cuda:0")


def decode(rows: int, context: int) -> dict[str, Any]:
    """One line of decode."""
    pages, lanes = context // BLOCK, rows * GROUPS
    kernels, steps = GpuBlockKernels(rows, pages, GROUPS, _CUDA), GpuKernels(rows, GROUPS, _CUDA)
    table = torch.randperm(rows * pages, device="cuda").int().view(rows, pages)
    batch = DecodeBatch(
        seats=torch.arange(rows, dtype=torch.int32, device="cuda"),
        length=torch.full((rows,), context, dtype=torch.int32, device="cuda"),
        real_rows=torch.tensor([rows], dtype=torch.int32, device="cuda"),
        host_pages=table,
        device_pages=table,
        groups=GROUPS,
        block_tokens=BLOCK,
        blocks_per_page=1,
        most_blocks=pages,
    )
    key_bytes = rows * context * DIM * 2
    layers = max(2, min(32, _KEY_BYTES // key_bytes))
    keys = [normal(rows * pages, 1, BLOCK, DIM) for _ in range(layers)]
    index, query = normal(rows, GROUPS, DIM), normal(rows, HEADS, HEAD_DIM)
    chosen = kernels.choose(batch, keys[0], index, TOP_K).flatten(0, 1)
    pools = [normal(lanes * 2 * TOP_K, BLOCK, 2, 1, HEAD_DIM) for _ in range(4)]
    slots = torch.randperm(lanes * 2 * TOP_K, device="cuda")[: lanes * TOP_K].int().view(lanes, TOP_K)
    return {
        "rows": rows,
        "context": context,
        "choose_us": graph_us(lambda layer: kernels.choose(batch, keys[layer], index, TOP_K), layers),
        "keys_us": key_bytes / BYTES_A_SECOND * 1e6,
        "attend_us": graph_us(
            lambda layer: steps.attend(batch, query, pools[layer], slots, chosen, 0.06), len(pools)
        ),
        "records_us": lanes * TOP_K * BLOCK * 2 * HEAD_DIM * 2 / BYTES_A_SECOND * 1e6,
    }


def chunk(tokens: int, context: int) -> dict[str, Any]:
    """One line of prefill; TFLOP/s of what must be multiplied."""
    blocks, start = context // BLOCK, context - tokens
    kernels = GpuBlockKernels(1, blocks, GROUPS, _CUDA)
    pages = torch.randperm(blocks, device="cuda").int()
    keys, index = normal(blocks, 1, BLOCK, DIM), normal(tokens, GROUPS, DIM)
    sight = Sight(start, kernels.rank(pages, start, keys, index, TOP_K), BLOCK)
    first = max(0, start - WINDOW)
    count = (start - first) or tokens
    key, value = normal(2, count, GROUPS, HEAD_DIM)
    query = normal(tokens, HEADS, HEAD_DIM)
    rank = seconds_of(lambda: kernels.rank(pages, start, keys, index, TOP_K), lambda: None, 3)
    attend = seconds_of(lambda: kernels.attend_chosen(query, key, value, first, sight, 0.06), lambda: None, 3)
    scored = sum((start + i) // BLOCK * BLOCK for i in range(tokens) if (start + i) // BLOCK >= TOP_K)
    there = int(((sight.blocks >= first // BLOCK) & (sight.blocks < (first + count) // BLOCK)).sum())
    return {
        "chunk": tokens,
        "context": context,
        "rank_ms": 1e3 * rank,
        "rank_tflop_s": 2 * scored * GROUPS * DIM / rank / 1e12,
        "attend_ms": 1e3 * attend,
        "attend_tflop_s": 4 * there * BLOCK * (HEADS // GROUPS) * HEAD_DIM / attend / 1e12,
    }


def main() -> None:
    """Measure, print, write JSON."""
    lines = []
    for measure, cases in ((decode, DECODE), (chunk, CHUNKS)):
        for case in cases:
            lines.append(measure(*case))
            print("  ".join(f"{name}={value:.4g}" for name, value in lines[-1].items()), flush=True)
            torch.cuda.empty_cache()
    report.write("choose_blocks", {**report.gpu(), "rows": lines})


if __name__ == "__main__":
    main()

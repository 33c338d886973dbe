"""How long a DSA model's layer chooses and attends on a GPU: launches in one graph over several layers' keys.

    python -m benchmarks.choose

GLM's shapes, bf16: decode's choice (scores and their top-k) beside the time of the keys' bytes, decode's
attention over what was chosen, and a prompt's chunk: its choice, and its attention over one window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.gpu_timing import seconds_of
from services.decoder.kernels.choose_tokens import IndexQuery
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.gpu.latent_kernels import GpuLatentKernels

HEADS, LATENT, ROPED, INDEX_HEADS, DIM, TOP_K, PAGE = 64, 512, 64, 32, 128, 2048, 64
DECODE = ((1, 8192), (1, 32768), (1, 163840), (8, 32768), (8, 163840), (32, 32768))
CHUNKS = ((4096, 4096), (4096, 32768), (2048, 163840))  # tokens of a prompt's chunk that ends at this context
WINDOW = 16384
BYTES_A_SECOND = 4.2e12  # of a device copy on an H200, docs/log.md
_KEY_BYTES = 2**30  # of different layers' keys in a graph: more than a cache holds


def graph_us(launch: Callable[[int], object], layers: int) -> float:
    """Median microseconds a layer of a graph of all of them."""
    for _ in range(2):
        launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            launch(layer)
    return seconds_of(graph.replay, lambda: None, 5) / layers * 1e6


def normal(*shape: int) -> Tensor:
    """Random numbers."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def index_query(tokens: int) -> IndexQuery:
    """Of so many tokens."""
    return IndexQuery(normal(tokens, INDEX_HEADS, DIM), torch.randn(tokens, INDEX_HEADS, device="cuda"))


def decode(rows: int, context: int) -> dict[str, Any]:
    """One line of decode."""
    pages = context // PAGE
    kernels = GpuLatentKernels(rows, context, HEADS, torch.device("cuda:0"))
    table = torch.randperm(rows * pages, device="cuda").int().view(rows, pages)
    batch = DecodeBatch(
        seats=torch.arange(rows, dtype=torch.int32, device="cuda"),
        length=torch.full((rows,), context, dtype=torch.int32, device="cuda"),
        real_rows=torch.tensor([rows], dtype=torch.int32, device="cuda"),
        host_pages=table,
        device_pages=table,
        groups=1,
        block_tokens=1,
        blocks_per_page=PAGE,
        most_blocks=context,
    )
    key_bytes = rows * context * DIM * 2
    layers = max(2, min(32, _KEY_BYTES // key_bytes))
    keys, index = [normal(rows * context, DIM) for _ in range(layers)], index_query(rows)
    chosen = kernels.choose(batch, keys[0], index, TOP_K)
    pools = [normal(rows * 2 * TOP_K, 1, LATENT + ROPED) for _ in range(8)]
    slots = torch.randperm(rows * 2 * TOP_K, device="cuda")[: rows * TOP_K].int().view(rows, TOP_K)
    query = normal(rows, HEADS, LATENT + ROPED)
    return {
        "rows": rows,
        "context": context,
        "choose_us": graph_us(lambda layer: kernels.choose(batch, keys[layer], index, TOP_K), layers),
        "keys_us": key_bytes / BYTES_A_SECOND * 1e6,
        "attend_us": graph_us(
            lambda layer: kernels.attend(batch, query, pools[layer], slots, chosen, 0.06, LATENT), 8
        ),
        "records_us": rows * TOP_K * (LATENT + ROPED) * 2 / BYTES_A_SECOND * 1e6,
    }


def chunk(tokens: int, context: int) -> dict[str, Any]:
    """One line of prefill; TFLOP/s of what must be multiplied."""
    kernels = GpuLatentKernels(1, context, HEADS, torch.device("cuda:0"))
    pages = torch.randperm(context // PAGE, device="cuda").int()
    keys, index, start = normal(context, DIM), index_query(tokens), context - tokens
    call = (pages, PAGE, start, keys, index, TOP_K)
    window = min(WINDOW, context)
    record, query = normal(window, LATENT + ROPED), normal(tokens, HEADS, LATENT + ROPED)
    chosen = (
        torch.rand(tokens, window, device="cuda").topk(min(TOP_K, window), 1).indices.sort(1).values.int()
    )
    kernels.rank(*call)
    kernels.attend_chosen(query, record, chosen, 0.06, LATENT)
    rank = seconds_of(lambda: kernels.rank(*call), lambda: None, 3)
    attend = seconds_of(lambda: kernels.attend_chosen(query, record, chosen, 0.06, LATENT), lambda: None, 3)
    scored = sum(start + i + 1 for i in range(tokens) if start + i + 1 > TOP_K)
    return {
        "chunk": tokens,
        "context": context,
        "rank_ms": 1e3 * rank,
        "rank_tflop_s": 2 * scored * INDEX_HEADS * DIM / rank / 1e12,
        "attend_ms": 1e3 * attend,
        "attend_tflop_s": 2 * chosen.numel() * HEADS * (2 * LATENT + ROPED) / attend / 1e12,
    }


def main() -> None:
    """Measure, print, write JSON."""
    lines = []
    for measure, cases in ((decode, DECODE), (chunk, CHUNKS)):
        for case in cases:
            lines.append(measure(*case))
            print("  ".join(f"{name}={value:.4g}" for name, value in lines[-1].items()), flush=True)
            torch.cuda.empty_cache()
    report.write("choose", {**report.gpu(), "rows": lines})


if __name__ == "__main__":
    main()

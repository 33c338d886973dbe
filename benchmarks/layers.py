"""A decode step's layers on a GPU without attention, against the bytes of their weights.

    python -m benchmarks.layers [--model qwen3-8b] [--layers N] [--batches 1,8,32]

Real shapes, random weights, bfloat16; attention hands the query back. Each variant is one captured CUDA graph
from token ids to logits. The floor is the weights' bytes over what a large copy on an H200 moves a second.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.gpu_timing import seconds_of
from benchmarks.synthetic import SHAPES, synthetic_config, synthetic_spec
from services.decoder.attention.step import Step
from services.decoder.kernels.dense import DenseOps, TorchDense
from services.decoder.kernels.gpu.dense import GpuDense
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.weights import random_weights

BYTES_PER_SECOND = 4.26e12  # read and written, of a large device copy on an H200
REPLAYS = 10


class StubStep(Step):
    """A step whose attention costs nothing."""

    def __init__(self) -> None:  # no heart, no rows
        pass

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """The query, in attention's shape."""
        return query


@torch.inference_mode()
def milliseconds(model: CausalLM, batch: int, device: torch.device) -> float:
    """Of one captured step of `batch` rows."""
    tokens = torch.randint(model.spec.vocab_size, (batch,), device=device)
    positions = torch.arange(8000, 8000 + batch, device=device)

    def step() -> Tensor:
        return model.decode_logits(model.decode_hidden(tokens, positions, StubStep()))

    graph = captured(step)

    def replay() -> None:
        for _ in range(REPLAYS):
            graph.replay()

    taken = seconds_of(replay, lambda: None, 5) / REPLAYS
    return 1e3 * taken


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`work` as a graph, after it has run once beside it."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=0, help="instead of the model's own number")
    parser.add_argument("--batches", default="1,8,32")
    wanted = parser.parse_args()
    device = torch.device("cuda:0")
    spec = synthetic_spec(synthetic_config(wanted.model, wanted.layers))
    weights = random_weights(spec, torch.bfloat16, device, 0)
    variants: dict[str, DenseOps | None] = {
        "fused, kernels": GpuDense(),
        "fused, torch": TorchDense(),
        "transformers": None,
    }
    # One row of the embedding is read, unless it is the head too.
    unread = 0 if spec.config.tie_word_embeddings else 2 * spec.vocab_size * spec.config.hidden_size
    rows: list[dict[str, Any]] = []
    print("variant         batch       ms    floor  ratio")
    for variant, dense in variants.items():
        model = CausalLM(spec, torch.bfloat16, device, dense=dense, model=weights)
        floor = 1e3 * (model.weight_bytes - unread) / BYTES_PER_SECOND
        for batch in map(int, wanted.batches.split(",")):
            taken = milliseconds(model, batch, device)
            rows.append(
                {
                    "variant": variant,
                    "batch": batch,
                    "ms": round(taken, 3),
                    "floor_ms": round(floor, 3),
                    "ratio": round(taken / floor, 3),
                }
            )
            print(f"{variant:<15}{batch:>6}{taken:>9.3f}{floor:>9.3f}{taken / floor:>7.2f}", flush=True)
        del model
        sizes = {"model": wanted.model, "layers": spec.layers}
        report.write("layers", {**report.gpu(), **sizes, "rows": rows})


if __name__ == "__main__":
    main()

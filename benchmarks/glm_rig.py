"""A slice of GLM in the middle of long answers, whose choices are a trace's.

Knows how engine and scheduler are told so; not what is timed. The indexer runs and is paid for; then its
choice is put aside for one with a known locality, because random weights have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.decode_rig import pretend
from services.decoder.attention.selector import TokenSelector
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.kernels.choose_tokens import IndexQuery
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.index_code import code_keys, hadamard
from services.decoder.kernels.record_code import coded_bytes
from services.decoder.kv.batch import PrefillChunk
from services.decoder.kv.shape import KvShape
from services.decoder.models.causal_lm import CausalLM
from services.decoder.settings import DecoderSettings


class Trace:
    """Choices by a row's place in the batch and its own step; all layers make the same one."""

    def __init__(self, chosen: Tensor, context: int) -> None:
        """`chosen` [steps, rows, top_k - 1] int32, of the first `context` tokens; the newest comes last."""
        self._steps, self._rows, _ = chosen.shape
        self._chosen = chosen.flatten(0, 1)
        self._context = context
        self._current = chosen[0]

    def choose(self, batch: DecodeBatch, *, moves_on: bool) -> Tensor:
        """[rows, top_k] int32 for the rows' newest tokens, or what was chosen last."""
        if moves_on:
            rows = batch.seats.shape[0]
            step = (batch.length - 1 - self._context).clamp_(0, self._steps - 1)
            place = step * self._rows + torch.arange(rows, dtype=torch.int32, device=step.device)
            newest = (batch.length - 1).unsqueeze(1)
            self._current = torch.cat([self._chosen.index_select(0, place), newest], 1)
        return self._current


class Traced:
    """A selector whose choice is made and put aside for the trace's."""

    def __init__(self, selector: TokenSelector, trace: Trace, *, is_first: bool) -> None:
        self._selector, self._trace, self._is_first = selector, trace, is_first

    def fill(self, chunk: PrefillChunk, key: Tensor) -> None:
        self._selector.fill(chunk, key)

    def observe(self, batch: DecodeBatch, key: Tensor) -> None:
        self._selector.observe(batch, key)

    def select(self, batch: DecodeBatch, index: IndexQuery) -> Tensor:
        self._selector.select(batch, index)
        return self._trace.choose(batch, moves_on=self._is_first)

    def rank(self, chunk: PrefillChunk, index: IndexQuery) -> Tensor:
        return self._selector.rank(chunk, index)


def engine_in_mid_answer(
    model: CausalLM,
    trace: Trace,
    *,
    rows: int,
    context: int,
    longest: int,
    changes: Mapping[str, object],
    device: str = "cuda:0",
) -> OfflineEngine:
    """`rows` rows of `context` tokens that are about to decode up to `longest`; KV and keys are made up.

    `changes` are settings: mode, hot slots, probes.
    """
    spec = model.spec
    assert spec.latent is not None
    base: dict[str, object] = {
        "model": Path("synthetic"),
        "device": device,
        "block_tokens": 1,
        "budget_tokens": spec.latent.top_k,
        "max_rows": rows,
        "max_model_len": longest,
        "max_step_tokens": rows * (context + 1),
        "prefix_cache": False,
    }
    settings = DecoderSettings.model_validate({**base, **changes})
    latent, itemsize = spec.latent, model.dtype.itemsize
    record_bytes = spec.head_dim * itemsize
    if settings.record_dtype == "float8":
        record_bytes = coded_bytes(latent.latent, latent.roped)
    token_bytes = spec.layers * record_bytes + len(set(latent.anchors)) * latent.index_dim * itemsize
    pages = rows * (-(-longest // settings.page_tokens) + 1)
    arena_bytes = int(pages * settings.page_tokens * token_bytes * 1.01) + 2**23

    def wrap(layer: int, selector: TokenSelector) -> TokenSelector:
        return Traced(selector, trace, is_first=layer == 0)

    engine = OfflineEngine(settings, arena_bytes, model, wrap_tokens=wrap)
    runner = engine.runner
    assert runner.index is not None
    _make_up(runner.index.pool, engine.plan.shape)
    for number in range(rows):
        prompt = [(7 * number + i) % (spec.vocab_size - 3) + 2 for i in range(context)]
        engine.scheduler.submit([Sequence(str(number), 0, prompt, Sampling(), 0, longest - context)])
    while any(sequence.is_prefilling for sequence in engine.scheduler.running) or engine.scheduler.waiting:
        pretend(engine)
    return engine


def _make_up(pool: Tensor, shape: KvShape) -> None:
    """Fill an index with keys, [layers, pages, index elements], some pages at a time."""
    generator = torch.Generator(pool.device).manual_seed(2)
    if not shape.index_coded:
        pool.normal_(generator=generator)
        return
    rotation = hadamard(shape.index_dim, pool.device)
    for pages in torch.split(pool.flatten(0, 1), 1024):
        count = len(pages) * shape.page_tokens
        keys = torch.randn(count, shape.index_dim, generator=generator, device=pool.device)
        pages.copy_(code_keys(keys, rotation).view(len(pages), -1))


def shed(engine: OfflineEngine, rows: int) -> None:
    """End the last ones of the rows, until so many run."""
    for sequence in engine.scheduler.running[rows:]:
        engine.scheduler.abort(sequence.request_id, {0})

"""An offline engine whose rows are in the middle of long contexts, without the prefill that led there.

Knows how the scheduler and the runner are told so; not what is timed. KV and bounds are random numbers, so
attention and Quest do all of their work. What tiered misses cannot come from a random model, whose choices
mean nothing: `Traced` puts a choice of a known miss rate in place of Quest's, after Quest has chosen. Or
rows have slots for all their blocks (`whole`): the trace walks through them all, and from then on chooses at
random.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from services.decoder.attention.selector import Selector
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import SampledToken, Sampling, Sequence
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kv.batch import PrefillChunk
from services.decoder.models.causal_lm import CausalLM
from services.decoder.settings import DecoderSettings

BLOCK_TOKENS = 16
ANSWER_TOKENS = 200  # room behind the context


class Trace:
    """What each lane chooses, step by step.

    The open block is the last of every choice. All layers make the same choice: that costs one launch a step,
    where the real select has cost its own already.
    """

    def __init__(self, chosen: Tensor, context: int) -> None:
        """`chosen` [steps, lanes, top_k - 1] int32 full blocks of rows that begin with `context` tokens."""
        steps, lanes, _ = chosen.shape
        opened = (context + torch.arange(steps, device=chosen.device).int()) // BLOCK_TOKENS
        last = opened.view(-1, 1, 1).expand(-1, lanes, 1)
        self._chosen = torch.cat([chosen, last], 2).contiguous()
        self._step = torch.full((1,), -1, dtype=torch.int64, device=chosen.device)
        self._current = self._chosen[0]

    @classmethod
    def missing(cls, lanes: int, context: int, top_k: int, misses: int, steps: int) -> Trace:
        """Exactly `misses` a lane and step are not among the last blocks, as many as its slots.

        A lane's full blocks stand on a ring in random order; each step the window of chosen ones moves on by
        `misses`, so what enters it left it longest ago.
        """
        generator = torch.Generator(device="cuda").manual_seed(1)
        blocks = context // BLOCK_TOKENS - 1
        order = torch.rand(lanes, blocks, device="cuda", generator=generator).argsort(1).int()
        start = torch.arange(steps, device="cuda").unsqueeze(1) * misses
        place = (start + torch.arange(top_k - 1, device="cuda")) % blocks
        return cls(order[:, place].transpose(0, 1), context)

    @classmethod
    def touching(cls, lanes: int, context: int, top_k: int, steps: int) -> Trace:
        """Every block once, in `touching_steps` steps; then any."""
        generator = torch.Generator(device="cuda").manual_seed(1)
        blocks = context // BLOCK_TOKENS
        chosen = (
            torch.rand(steps, lanes, blocks, device="cuda", generator=generator).topk(top_k - 1, 2).indices
        )
        first = torch.arange(touching_steps(context, top_k) * (top_k - 1), device="cuda") % blocks
        walk = first.view(-1, 1, top_k - 1)
        chosen[: walk.shape[0]] = walk
        return cls(chosen.int(), context)

    def rewind(self) -> None:
        """Begin anew with the next step."""
        self._step.fill_(-1)

    def choose(self, lanes: int, *, moves_on: bool) -> Tensor:
        """[lanes, top_k] int32 of the next step, or again of this one."""
        if moves_on:
            self._step.add_(1)
            self._current = self._chosen.index_select(0, self._step)[0, :lanes]
        return self._current


class Traced:
    """A selector whose choice is made and put aside for the trace's."""

    def __init__(self, selector: Selector, trace: Trace, *, is_first: bool) -> None:
        self._selector, self._trace, self._is_first = selector, trace, is_first
        self.bounds = selector.bounds

    def fill(self, chunk: PrefillChunk, key: Tensor) -> None:
        self._selector.fill(chunk, key)

    def observe(self, batch: DecodeBatch, key: Tensor) -> None:
        self._selector.observe(batch, key)

    def select(self, batch: DecodeBatch, query: Tensor) -> Tensor:
        self._selector.select(batch, query)
        return self._trace.choose(batch.seats.shape[0] * batch.groups, moves_on=self._is_first)


def touching_steps(context: int, top_k: int) -> int:
    """Steps in which a lane can have chosen all of its blocks."""
    return -(-(context // BLOCK_TOKENS) // (top_k - 1))


def engine_in_mid_answer(
    model: CausalLM,
    *,
    batch: int,
    context: int,
    budget: int,
    mode: str,
    misses: float = 0.0,
    skip_io: bool = False,
    graphs: bool = True,
    whole: bool = False,
    traced: Tensor | None = None,
    hits_first: bool = False,
    device: str = "cuda:0",
) -> OfflineEngine:
    """`batch` rows of `context` tokens that are about to decode.

    Args:
        model: any.
        batch: rows.
        context: tokens a row.
        budget: Quest's, tokens.
        mode: full or tiered, where each row has a share of twice the budget.
        misses: share of a step's choices that miss, if tiered.
        skip_io: resolve moves no bytes.
        graphs: decode by captured graphs.
        whole: in tiered mode, have slots for everything; touched after `touching_steps` steps.
        traced: a Trace's choices, in place of ones that miss by `misses`.
        hits_first: the setting.
        device: where.
    """
    longest = -(-(context + ANSWER_TOKENS) // 64) * 64
    spec, top_k = model.spec, budget // BLOCK_TOKENS
    token_bytes = spec.layers * spec.kv_heads * 2 * spec.head_dim * model.dtype.itemsize
    tokens_a_row = longest + 256 if whole else 2 * budget
    table_bytes = 8 * spec.layers * spec.kv_heads / BLOCK_TOKENS  # of a token's hot slots
    settings = DecoderSettings.model_validate(
        {
            "model": Path("synthetic"),
            "device": device,
            "kv_mode": mode,
            "hot_tokens": 0 if mode == "full" else min(2 * budget, longest),
            "hot_bytes": int(batch * tokens_a_row * (token_bytes + table_bytes)),
            "budget_tokens": budget,
            "block_tokens": BLOCK_TOKENS,
            "max_rows": batch,
            "max_model_len": longest,
            "max_step_tokens": batch * context + BLOCK_TOKENS,
            "decode_graphs": graphs,
            "probe_no_io": skip_io,
            "hits_first": hits_first,
        }
    )
    arena_bytes = int(batch * longest * token_bytes * 1.25) + 2**28
    lanes = batch * spec.kv_heads
    if traced is not None:
        trace = Trace(traced, context)
    elif whole:
        trace = Trace.touching(lanes, context, top_k, ANSWER_TOKENS)
    else:
        trace = Trace.missing(lanes, context, top_k, round(misses * top_k), ANSWER_TOKENS)

    def wrap(layer: int, selector: Selector) -> Selector:
        return Traced(selector, trace, is_first=layer == 0) if whole or mode == "tiered" else selector

    engine = OfflineEngine(settings, arena_bytes, model, wrap)
    runner = engine.runner
    assert runner.index is not None
    generator = torch.Generator(runner.index.pool.device).manual_seed(2)
    runner.index.pool.normal_(generator=generator)
    if mode == "full":
        for layer in range(spec.layers):
            runner.residence.pool(layer).normal_(generator=generator)
    vocabulary = min(spec.vocab_size, 30_000)
    for number in range(batch):
        prompt = [(7 * number + i) % vocabulary for i in range(context)]
        engine.scheduler.submit([Sequence(str(number), 0, prompt, Sampling(), 0, ANSWER_TOKENS)])
    while any(sequence.is_prefilling for sequence in engine.scheduler.running) or engine.scheduler.waiting:
        pretend(engine)
    trace.rewind()
    runner.wait()
    return engine


def pretend(engine: OfflineEngine) -> None:
    """A prefill step in which nothing is computed."""
    plan, runner = engine.scheduler.plan(), engine.runner
    runner.residence.resize(plan.resizes)
    for row, first, host_pages, device_pages in plan.new_pages:
        runner.tables.put(row, first, host_pages, device_pages)
    done = {}
    for sequence, _, end in plan.chunks:
        if end == len(sequence.prompt) and sequence.row is not None:
            runner.residence.seat(sequence.row, end)
            done[sequence.row] = SampledToken(1)
    for sequence in plan.decodes:
        assert sequence.row is not None
        done[sequence.row] = SampledToken(1)
    engine.scheduler.apply(plan, done)

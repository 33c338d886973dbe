"""Carries a step plan out: tables, one forward pass, sampling.

Knows tensors; who runs when was the scheduler's decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from services.decoder.attention.heart import Heart
from services.decoder.attention.latent_heart import LatentHeart
from services.decoder.attention.latent_step import step_over
from services.decoder.engine.decode_graphs import DecodeGraphs
from services.decoder.engine.draw import Draw, Drawn
from services.decoder.engine.loads_beside import LoadsBeside, load_kv_and_index
from services.decoder.engine.prompt_tails import PromptTails
from services.decoder.engine.running_step import RunningStep
from services.decoder.engine.sampler import score_prompt
from services.decoder.engine.sequence import SampledToken, Sequence
from services.decoder.engine.step_clock import Mark, StepClock
from services.decoder.engine.step_plan import Arrival, Chunk, StepPlan
from services.decoder.kv.batch import PrefillChunk, decode_batch
from services.decoder.kv.paged_index import PagedIndex
from services.decoder.kv.residence import Residence
from services.decoder.kv.row_tables import RowTables
from services.decoder.kv.shape import KvShape
from services.decoder.models.causal_lm import CausalLM

_SCORED_AT_ONCE = 256  # prompt tokens: their logits over a large vocabulary are 150 MB


class _Chunks(NamedTuple):
    """Of a step."""

    fresh: list[Chunk]  # to be computed
    built: tuple[PrefillChunk, ...]  # the same, for the layers
    ends: dict[Chunk, Tensor]  # computed before: [1, hidden size] of the last token


@dataclass(frozen=True, slots=True)
class Runner:
    """The device side of one engine, put together by assembly.py."""

    model: CausalLM
    shape: KvShape
    tables: RowTables
    residence: Residence
    index: PagedIndex | None
    heart: Heart | LatentHeart
    draw: Draw
    graphs: DecodeGraphs | None  # on a GPU, where decode rows run by themselves
    clock: StepClock | None = None  # on a GPU
    beside: LoadsBeside | None = None  # where newcomers wait for what was found for them

    @property
    def tails(self) -> PromptTails | None:
        """What computes ends of prompts beside the steps, where anything does."""
        return None if self.beside is None else self.beside.tails

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be launched while the one before it runs."""
        return self.graphs is not None

    def arrived(self) -> list[Arrival]:
        """What was loaded beside the steps and is there, each told once."""
        return [] if self.beside is None else self.beside.arrived()

    def run(self, plan: StepPlan) -> dict[int, SampledToken]:
        """`launch` and `collect` in one."""
        return self.launch(plan).collect()

    def wait(self) -> None:
        """Until the device has done all that was launched; what was computed beside steps is forgotten."""
        if self.tables.host_pages.is_cuda:
            torch.cuda.synchronize(self.tables.host_pages.device)
        if self.beside is not None:
            self.beside.drop()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> RunningStep:
        """Begin to compute the step: on a GPU this returns before it is done.

        A plan that is `ahead` continues the step launched last, with the tokens that it draws. Of a plan with
        chunks only the decode rows are launched; the rest, and what it loads for those chunks, waits for
        `complete`, so that its many launches do not keep anybody from the tokens of the step before.
        """
        step = RunningStep(plan, clock=self.clock, mark=self._begin(plan))
        for row in plan.left_rows:
            self.residence.leave(row)
            if self.tails is not None:
                self.tails.leave(row)
        if plan.resizes:
            self.residence.resize(plan.resizes)
        for row, first, host_pages, device_pages in plan.new_pages:
            self.tables.put(row, first, host_pages, device_pages)
        if self.beside is not None:
            self.beside.start(plan.arrivals)
            step.meanwhile = self.beside.work
            if plan.awaits:
                step.awaits = self.beside.wait_for_one
        if plan.seats or not plan.tokens:
            self._load(plan)  # else it can wait: no row that decodes reads what is loaded for others
        for sequence in plan.seats:
            self.residence.seat(_row(sequence), sequence.computed)
            if self.index is not None:
                last = (sequence.computed - 1) // self.shape.page_tokens
                host, device = sequence.host_pages[last].page, sequence.device_pages[last]
                self.index.reopen(host, device, sequence.computed)
            self.draw.seat(sequence)
        if not plan.tokens:
            step.done = self._done(plan)
            return step
        with self._nothing_left_behind():
            self._launch(step)
        if not plan.chunks:
            step.complete()
        return step

    def _launch(self, step: RunningStep) -> None:
        plan, ends = step.plan, self._computed_ends(step.plan)
        fresh = [chunk for chunk in plan.chunks if chunk not in ends]
        chunks = tuple(
            PrefillChunk.build(self.shape, self.tables, _row(sequence), start, end)
            for sequence, start, end in fresh
        )
        if chunks:
            if self.tails is not None:
                self.tails.hold()
            self.residence.begin(chunks)
        clock, mark = step.clock, step.mark
        if clock is not None and mark is not None:
            clock.inputs(mark)
        logits = self._decode(plan)
        if clock is not None and mark is not None:
            clock.decoded(mark)
        late = [int(plan.ahead)] * len(plan.decodes)
        late += [0] * (len(plan.drawing) - len(late))
        said = [len(sequence.generated) + more for sequence, more in zip(plan.drawing, late, strict=True)]
        step.rest = partial(self._launch_rest, step, _Chunks(fresh, chunks, ends), logits, said)

    def _computed_ends(self, plan: StepPlan) -> dict[Chunk, Tensor]:
        """Of the chunks that need not be computed any more, [1, hidden size] of the last token."""
        if self.tails is None:
            return {}
        ends = {chunk: self.tails.take(chunk) for chunk in plan.chunks}
        return {chunk: hidden for chunk, hidden in ends.items() if hidden is not None}

    @torch.inference_mode()
    def _launch_rest(
        self, step: RunningStep, chunks: _Chunks, logits: Tensor | None, said: list[int]
    ) -> None:
        """What follows the decode rows; `said` has the tokens of each answer that come before the draw's."""
        plan, hidden = step.plan, None
        with self._nothing_left_behind():
            if not plan.seats:
                self._load(plan)
            if chunks.fresh or (plan.decodes and logits is None):
                hidden = self._forward(plan, chunks, with_decodes=logits is None)
            if chunks.fresh:
                self.residence.finish()
                if self.tails is not None:
                    self.tails.release()
            if plan.chunks and self.index is not None:
                # Before the draw: who has the step's tokens may seal its pages.
                self.index.save(plan.chunk_pages(self.shape.page_tokens))
            self.residence.settle()
            if hidden is not None:
                self._score_prompts(chunks.fresh, hidden)
            step.rows, step.drawn = self._sample(plan, logits, hidden, chunks.ends, said)
            for sequence, _, end in plan.chunks:
                if end == len(sequence.prompt):
                    self.residence.seat(_row(sequence), end)
        if step.clock is not None and step.mark is not None:
            step.clock.end(step.mark)
        step.done = self._done(plan)

    @contextmanager
    def _nothing_left_behind(self) -> Iterator[None]:
        """Where a launch fails: its pages are about to be given back, so nothing may be under way."""
        try:
            yield
        except Exception:  # whatever it was, a kernel that does not compile included
            self.residence.abandon()
            self.wait()
            raise

    def _load(self, plan: StepPlan) -> None:
        load_kv_and_index(self.residence, self.index, plan.loads)

    def _done(self, plan: StepPlan) -> torch.cuda.Event | None:
        """What to wait for where the tokens are not the last that a step does; none on a CPU."""
        if not self.tables.host_pages.is_cuda or not (plan.chunks or plan.loads or plan.seats):
            return None
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        done.record(torch.cuda.current_stream())
        return done

    def _begin(self, plan: StepPlan) -> Mark | None:
        if self.clock is None or not plan.tokens:
            return None
        only = not (plan.chunks or plan.seats)
        moves = bool(plan.left_rows or plan.resizes or plan.new_pages or plan.loads or plan.seats)
        return self.clock.begin(decodes=bool(plan.decodes), only=only, moves=moves)

    def _decode(self, plan: StepPlan) -> Tensor | None:
        """Decode rows by graph, `[rows and padding, vocab]`; None where they run packed with the chunks."""
        if self.graphs is None or not plan.decodes:
            return None
        rows = [_row(sequence) for sequence in plan.decodes]
        positions = [plan.position(sequence) for sequence in plan.decodes]
        if plan.ahead:
            return self.graphs.run(rows, positions, from_draw=plan.from_draw)
        return self.graphs.run(rows, positions, [sequence.generated[-1] for sequence in plan.decodes])

    def _forward(self, plan: StepPlan, chunks: _Chunks, *, with_decodes: bool) -> Tensor:
        """Decode rows first, then the chunks: `[tokens, hidden size]`."""
        decodes = plan.decodes if with_decodes else []
        tokens = [sequence.generated[-1] for sequence in decodes]
        positions = [plan.position(sequence) for sequence in decodes]
        rows = [_row(sequence) for sequence in decodes]
        batch = decode_batch(self.shape, self.tables, rows, positions) if rows else None
        for sequence, start, end in chunks.fresh:
            tokens += sequence.prompt[start:end]
            positions += range(start, end)
        hidden = self.model.hidden(tokens, positions, step_over(self.heart, batch, chunks.built))
        if batch is not None and self.index is not None:
            self.index.decoded(batch)
        return hidden

    def _sample(
        self,
        plan: StepPlan,
        logits: Tensor | None,
        hidden: Tensor | None,
        ends: Mapping[Chunk, Tensor],
        said: list[int],
    ) -> tuple[list[int], Drawn | None]:
        """Draw for every row that has its next logits; without `logits`, decode rows begin `hidden`.

        Of the chunks in `ends`, that is their last token's; those of the others follow in `hidden`.
        """
        sequences, states = plan.drawing, []
        at = len(plan.decodes) if logits is None else 0
        if at:
            assert hidden is not None, "decode rows begin it"
            states.append(hidden[:at])
        for chunk in plan.chunks:
            sequence, start, end = chunk
            state = ends.get(chunk)
            if state is None:
                assert hidden is not None, "the chunk is in it"
                at += end - start
                state = hidden[at - 1 : at]
            if end == len(sequence.prompt):
                states.append(state)
                self.draw.seat(sequence)
        if not sequences:
            return [], None
        if states:
            others = self.model.logits(torch.cat(states))
            logits = others if logits is None else torch.cat([logits[: len(plan.decodes)], others])
        assert logits is not None, "rows came from somewhere"
        late = [count - len(sequence.generated) for count, sequence in zip(said, sequences, strict=True)]
        return [_row(sequence) for sequence in sequences], self.draw.launch(logits, sequences, late)

    def _score_prompts(self, chunks: list[Chunk], hidden: Tensor) -> None:
        """Log probabilities of prompt tokens, for those who asked; the chunks end `hidden`."""
        at = hidden.shape[0] - sum(end - start for _, start, end in chunks)
        for sequence, start, end in chunks:
            run = slice(at, at + end - start)
            at = run.stop
            if not sequence.sampling.prompt_logprobs:
                continue
            if start == 0:
                sequence.prompt_logprobs.append(SampledToken(sequence.prompt[0]))
            following = sequence.prompt[start + 1 : end + 1]
            for first in range(0, len(following), _SCORED_AT_ONCE):
                some = list(following[first : first + _SCORED_AT_ONCE])
                logits = self.model.logits(hidden[run][first : first + len(some)])
                sequence.prompt_logprobs += score_prompt(logits, some, sequence.sampling)


def _row(sequence: Sequence) -> int:
    assert sequence.row is not None, "only running sequences are in a plan"
    return sequence.row

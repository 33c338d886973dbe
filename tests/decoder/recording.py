"""A schedule as data: recorded from one engine, replayed on another, step composition and all."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.decoder.engine.host_pages import HostPage
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.runner import Runner
from services.decoder.engine.sequence import Sequence
from services.decoder.engine.step_plan import Chunk, NewPages, StepPlan
from services.decoder.kv.hot_class import Resize


@dataclass(frozen=True)
class RecordedStep:
    left_rows: list[int]
    resizes: list[Resize]
    new_pages: list[NewPages]
    decodes: list[int]  # index of each sequence
    chunks: list[tuple[int, int, int]]
    rows: dict[int, int]  # sequence -> row


@dataclass
class Recording:
    steps: list[RecordedStep] = field(default_factory=list)

    def attach(self, engine: OfflineEngine, sequences: list[Sequence]) -> None:
        """Note every plan that `engine` makes from now on."""
        number = {id(sequence): i for i, sequence in enumerate(sequences)}

        def note(plan: StepPlan) -> None:
            busy = [*plan.decodes, *(chunk.sequence for chunk in plan.chunks)]
            self.steps.append(
                RecordedStep(
                    left_rows=list(plan.left_rows),
                    resizes=list(plan.resizes),
                    new_pages=list(plan.new_pages),
                    decodes=[number[id(sequence)] for sequence in plan.decodes],
                    chunks=[(number[id(chunk.sequence)], chunk.start, chunk.end) for chunk in plan.chunks],
                    rows={number[id(s)]: s.row for s in busy if s.row is not None},
                )
            )

        engine.on_plan = note

    def replay(self, runner: Runner, sequences: list[Sequence]) -> None:
        """Run the same steps, whatever tokens come out of them."""
        for step in self.steps:
            for index, row in step.rows.items():
                sequences[index].row = row
            for pages in step.new_pages:
                owner = next(sequences[i] for i, row in step.rows.items() if row == pages.row)
                owner.host_pages += [HostPage(page, 1) for page in pages.host_pages]
                owner.device_pages += pages.device_pages
            plan = StepPlan(
                left_rows=list(step.left_rows),
                resizes=list(step.resizes),
                new_pages=list(step.new_pages),
                decodes=[sequences[i] for i in step.decodes],
                chunks=[Chunk(sequences[i], start, end) for i, start, end in step.chunks],
            )
            sampled = runner.run(plan)
            for sequence, _, end in plan.chunks:
                sequence.computed = end
            for sequence in plan.decodes:
                sequence.computed += 1
            for index, row in step.rows.items():
                if row in sampled:
                    sequences[index].take(sampled[row].token)

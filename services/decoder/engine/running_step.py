"""A step under way: launched in one piece or in two, its tokens still to come.

Knows the order of the calls, not what is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from services.decoder.engine.draw import Drawn
from services.decoder.engine.sequence import SampledToken
from services.decoder.engine.step_clock import Mark, StepClock
from services.decoder.engine.step_plan import StepPlan


@dataclass(slots=True)
class RunningStep:
    """Of a step with chunks, `rest` is what follows its decode rows."""

    plan: StepPlan
    rows: list[int] = field(default_factory=list)  # that get a token
    drawn: Drawn | None = None
    done: torch.cuda.Event | None = None  # behind the last thing that the step's chunks do to their pages
    clock: StepClock | None = None
    mark: Mark | None = None  # of the clock
    rest: Callable[[], None] | None = None
    awaits: Callable[[], None] | None = None  # what the next step cannot do without
    meanwhile: Callable[[], bool] | None = None  # launches other work or waits a moment; False: none is left

    def complete(self) -> None:
        """Launch what is left. Until then no other step is launched; books may change meanwhile.

        Raises:
            RuntimeError, HotsetError: as the runner's `launch`.
        """
        rest, self.rest = self.rest, None
        if rest is not None:
            rest()

    def collect(self) -> dict[int, SampledToken]:
        """Wait for the next token by row, of rows whose computed tokens reach their last one.

        A row whose logits are no numbers is left out. When this returns, pages of the step may be sealed or
        given to somebody else.
        """
        self.complete()
        if self.awaits is not None:
            self.awaits()
        if self.meanwhile is not None:
            while self.meanwhile() and not self._is_there():
                pass  # one piece a step at least, or whoever needs it would wait for ever
        if self.done is not None:
            self.done.synchronize()
        tokens = [] if self.drawn is None else self.drawn.collect()
        if self.clock is not None and self.mark is not None:
            self.clock.collected(self.mark)
        return {row: token for row, token in zip(self.rows, tokens, strict=True) if token is not None}

    def _is_there(self) -> bool:
        """Whether there is nothing to wait for any more."""
        if self.done is not None and not self.done.query():  # type: ignore[no-untyped-call]  # torch leaves it untyped
            return False
        return self.drawn is None or self.drawn.is_there

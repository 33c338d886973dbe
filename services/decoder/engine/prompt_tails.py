"""The end of a prompt whose beginning was found, computed beside the steps, layer by layer, while they run.

A short end takes a GPU little and its host long, for its launches are as many as a long one's: in a step,
all rows would wait for them. Here they are made while the host waits for a step's tokens, on a stream of
their own, and the step that has the end as its chunk finds it computed. It is the same computation over the
same pages, so a step may as well do it itself, and does where it has chunks of its own meanwhile.

Knows layers, streams and who is computed; not who may be, nor when pages come.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from services.contract.errors import HotsetError
from services.decoder.attention.heart import Heart
from services.decoder.attention.step import Step
from services.decoder.engine.sequence import Sequence
from services.decoder.engine.step_plan import Arrival, Chunk
from services.decoder.kv.batch import PrefillChunk
from services.decoder.kv.residence import Residence
from services.decoder.kv.row_tables import RowTables
from services.decoder.kv.shape import KvShape
from services.decoder.models.causal_lm import CausalLM

MOST_TOKENS = 256
"""Of an end. Longer ones keep the GPU itself busy."""

MOST_LAYERS_AHEAD = 8
"""Launched beside steps before the GPU has computed them. A stream takes some thousand launches, 18 layers at
128K tokens; the next one would wait there, and with it whoever launches steps.
"""

_PAUSE_SECONDS = 0.0002  # between looks at a GPU that has enough to do; a layer takes it ten times as long


class _Tail(NamedTuple):
    """One that was computed, as far as the host knows."""

    arrival: Arrival
    chunk: Chunk
    hidden: Tensor  # [1, hidden size] of the prompt's last token
    there: torch.cuda.Event | None


class PromptTails:
    """Of one engine; its loop alone calls it."""

    def __init__(
        self,
        model: CausalLM,
        shape: KvShape,
        tables: RowTables,
        residence: Residence,
        heart: Heart,
        step_tokens: int,
        device: torch.device,
    ) -> None:
        """Compute nothing yet; `step_tokens` is what a step computes at most."""
        self._most = min(MOST_TOKENS, step_tokens // 4)  # that a step beside decode rows has as one chunk
        self._model = model
        self._shape = shape
        self._tables = tables
        self._residence = residence
        self._heart = heart
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._due: deque[Arrival] = deque()
        self._begun: tuple[Arrival, Iterator[_Tail | None]] | None = None
        self._launched: deque[_Tail] = deque()
        self._under_way: deque[torch.cuda.Event] = deque()  # behind each layer of those that have begun
        self._passed: list[Arrival] = []  # not computed here after all, and not told yet
        self._ready: dict[int, _Tail] = {}  # by row
        self._held = False

    def takes(self, sequence: Sequence) -> bool:
        """Whether the end of its prompt can be computed here."""
        left = len(sequence.prompt) - sequence.computed
        return sequence.finish is None and 0 < left <= self._most and not self._held

    def add(self, arrival: Arrival) -> None:
        """Compute the end of one that `takes` says yes to, and whose pages are there."""
        self._due.append(arrival)

    def advance(self) -> bool:
        """Launch one layer, or let a moment pass if enough is under way; False if there is nothing to launch.

        Raises:
            torch.AcceleratorError: the device is lost.
        """
        while self._under_way and _is_over(self._under_way[0]):
            self._under_way.popleft()
        if len(self._under_way) < MOST_LAYERS_AHEAD or not self._may_launch:
            return self._launch()
        time.sleep(_PAUSE_SECONDS)  # not for a layer: the step that somebody waits for may be over before it
        return True

    @property
    def _may_launch(self) -> bool:
        return not self._held and bool(self._begun or self._due)

    def _launch(self) -> bool:
        """One layer, however much is under way; False if there is none."""
        if not self._may_launch:
            return False
        if self._begun is None:
            first = self._due.popleft()
            self._begun = first, self._launches(first)
            if self._stream is not None:
                # Behind the tables of its row, and what chunks of steps did to memory that is used here too.
                self._stream.wait_stream(torch.cuda.current_stream())
        arrival, launches = self._begun
        try:
            with self._beside():
                tail = next(launches)
        except torch.AcceleratorError:
            raise
        except (RuntimeError, HotsetError):  # memory is short, say: a step tries, and tells whom it concerns
            self._begun = None
            self._passed.append(arrival)
            return True
        if self._stream is not None:
            self._under_way.append(_now(self._stream))
        if tail is not None:
            self._begun = None
            self._launched.append(tail)
        return True

    def told(self) -> list[Arrival]:
        """Whose ends are there, or not to be waited for; each once."""
        done, self._passed = self._passed, []
        while self._launched:
            tail = self._launched[0]
            if tail.there is not None and not _is_over(tail.there):
                break
            self._ready[_row(tail.chunk.sequence)] = self._launched.popleft()
            done.append(tail.arrival)
        return done

    @property
    def has_work(self) -> bool:
        """Whether an end was added that nobody was told of."""
        return bool(self._due or self._begun or self._launched or self._passed)

    def wait_for_one(self) -> None:
        """Until an end that was added is there, if any was."""
        while not (self._launched or self._passed) and self._launch():
            pass
        if self._launched and (there := self._launched[0].there) is not None:
            there.synchronize()

    def take(self, chunk: Chunk) -> Tensor | None:
        """[1, hidden size] of the chunk's last token, if just this chunk was computed; it is forgotten."""
        tail = self._ready.pop(_row(chunk.sequence), None)
        if tail is None or tail.chunk != chunk:
            return None
        if self._stream is not None:
            tail.hidden.record_stream(torch.cuda.current_stream())
        return tail.hidden

    def leave(self, row: int) -> None:
        """Whoever had the row has left it."""
        self._ready.pop(row, None)

    def hold(self) -> None:
        """A step computes chunks of its own from here to `release`: what has begun comes before them."""
        while self._begun is not None:
            self._launch()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._held = True
        self._passed += self._due
        self._due.clear()

    def release(self) -> None:
        """They have been launched."""
        self._held = False

    def drop(self) -> None:
        """Forget it all, behind a wait for the device: steps failed, and their pages went back."""
        self._passed += self._due
        self._passed += [tail.arrival for tail in self._launched]
        if self._begun is not None:
            self._passed.append(self._begun[0])
        self._begun, self._held = None, False
        self._due.clear()
        self._launched.clear()
        self._under_way.clear()
        self._ready.clear()

    def _launches(self, arrival: Arrival) -> Iterator[_Tail | None]:
        """A layer each time; the tail comes last."""
        sequence = arrival.sequence
        start, end = sequence.computed, len(sequence.prompt)
        chunks = (PrefillChunk.build(self._shape, self._tables, _row(sequence), start, end),)
        self._residence.begin(chunks)
        step = Step(self._heart, None, chunks)
        for layer in self._model.walk(list(sequence.prompt[start:end]), list(range(start, end)), step):
            hidden = layer
            yield None
        last = hidden[-1:].clone()
        self._residence.finish()
        there = None if self._stream is None else _now(self._stream)
        yield _Tail(arrival, Chunk(sequence, start, end), last, there)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            yield


def _now(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    event.record(stream)
    return event


def _is_over(event: torch.cuda.Event) -> bool:
    over: bool = event.query()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return over


def _row(sequence: Sequence) -> int:
    assert sequence.row is not None, "who arrives has a row"
    return sequence.row

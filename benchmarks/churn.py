"""How long the host keeps a device waiting while rows make room for others, in real time.

    python -m benchmarks.churn [--cases 32768x16 131072x4] [--streams 4]

The real scheduler, stepper and store, a process of its own over gRPC; only the device is made up: it takes
the time that an H200 takes for a step of Qwen3-8B in `full` (docs/speed.md) and computes nothing. Every
prompt is known to the store but for its last page. Rows have device pages of their own, so each that ends
lets one in, whose pages are found, counted and loaded while the other's go back: `wait_ms` is how much longer
than the step under way that kept the host, a row let in. What the runner does for it is not in it: for that
there is `benchmarks.serve`, on a card.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.store import kvstore
from benchmarks.store_client import PLANES
from services.decoder.engine.limits import Limits
from services.decoder.engine.page_hash import PageHasher
from services.decoder.engine.scheduler import Scheduler
from services.decoder.engine.sequence import SampledToken, Sampling, Sequence
from services.decoder.engine.step_plan import StepPlan
from services.decoder.engine.stepper import Stepper
from services.decoder.engine.store_session import StoreSession
from services.decoder.kv.device_pages import DevicePages

PAGE_TOKENS = 64
ANSWER_TOKENS = 160
DECODE_SECONDS = 6e-3
LOAD_SECONDS = 2e-4  # a page
TOKEN_SECONDS = 4e-5  # of a prompt


class Case(NamedTuple):
    """So many rows of so many tokens at a time."""

    tokens: int
    rows: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """As in 32768x16."""
        tokens, _, rows = text.partition("x")
        return cls(int(tokens), int(rows))


@dataclass
class Step:
    """One under way: its decode rows, then its chunks."""

    plan: StepPlan
    device: Device
    done: float = 0.0
    is_complete: bool = False

    def complete(self) -> None:
        if not self.is_complete:
            self.is_complete = True
            tokens = sum(end - start for _, start, end in self.plan.chunks)
            self.done = self.device.run(TOKEN_SECONDS * tokens)

    def collect(self) -> dict[int, SampledToken]:
        while (left := self.done - time.perf_counter()) > 0:
            time.sleep(left)
        return {one.row: SampledToken(5) for one in self.plan.drawing if one.row is not None}


@dataclass
class Device:
    """Takes time for what it is given, in order."""

    runs_ahead: bool = True
    free_at: float = 0.0
    waits: list[float] = field(default_factory=list)  # before each step that continues rows

    def launch(self, plan: StepPlan) -> Step:
        if plan.decodes:
            self.waits.append(max(0.0, time.perf_counter() - self.free_at))
        self.run(LOAD_SECONDS * len(plan.loads) + DECODE_SECONDS * bool(plan.decodes))
        return Step(plan, self)

    def run(self, seconds: float) -> float:
        """When that will be done."""
        if seconds:
            self.free_at = max(self.free_at, time.perf_counter()) + seconds
        return self.free_at

    def wait(self) -> None:
        """Nothing goes wrong here."""


def measure(case: Case, streams: int, watch: Callable[[Stepper], None] | None = None) -> dict[str, Any]:
    """Serve `streams` prompts a row, all asked at once."""
    chance, count = random.Random(case.tokens), streams * case.rows
    row_pages = -(-(case.tokens + ANSWER_TOKENS) // PAGE_TOKENS)
    limits = Limits(
        max_rows=count,
        max_model_len=case.tokens + ANSWER_TOKENS,
        max_step_tokens=4096,
        max_waiting=count,
        block_tokens=16,
        page_tokens=PAGE_TOKENS,
    )
    common = [chance.randrange(30_000) for _ in range(case.tokens - PAGE_TOKENS)]
    with kvstore(row_pages + 8 * count) as (address, _):
        session = StoreSession(address, "churn")
        session.attach(bytes(32), PAGE_TOKENS, PLANES, 10.0)
        device = Device()
        pages = DevicePages(case.rows * (row_pages + 1))
        hasher = PageHasher(b"model", b"decoding", PAGE_TOKENS)
        scheduler = Scheduler(limits, session, pages, hasher, share_device_pages=False)
        stepper = Stepper(scheduler, device, nullcontext())

        def ask(number: int, answer: int) -> None:
            prompt = common + [chance.randrange(30_000) for _ in range(PAGE_TOKENS)]
            asked = [Sequence(str(number), 0, prompt, Sampling(), 0, answer)]
            scheduler.prepare(asked)
            scheduler.submit(asked)

        ask(-1, 1)
        while stepper.has_work:
            stepper.step()
        for number in range(count):
            ask(number, chance.randrange(ANSWER_TOKENS // 4, ANSWER_TOKENS))  # so that few end together
        gc.collect()
        gc.freeze()  # as the engine does
        device.waits.clear()
        if watch is None:
            while stepper.has_work:
                stepper.step()
        else:
            watch(stepper)
        gc.unfreeze()
        scheduler.check_integrity()
        session.close()
    let_in = count - case.rows
    return {
        "tokens": case.tokens,
        "rows": case.rows,
        "let_in": let_in,
        "steps": len(device.waits),
        "wait_ms": 1e3 * sum(device.waits) / let_in,
        "longest_ms": 1e3 * max(device.waits),
        "wait_us_a_step": 1e6 * sum(device.waits) / len(device.waits),
    }


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cases = [Case(32_768, 16), Case(131_072, 4)]
    parser.add_argument("--cases", type=Case.parse, nargs="+", default=cases, help="tokens x rows at a time")
    parser.add_argument("--streams", type=int, default=4, help="prompts a row, all asked at once")
    wanted = parser.parse_args()
    rows = []
    for case in wanted.cases:
        rows.append(measure(case, wanted.streams))
        print(" ".join(f"{name}={value:.4g}" for name, value in rows[-1].items()), flush=True)
    report.write("churn", {"rows": rows})
    for row in rows:
        print(f"churn_wait_{row['tokens']}x{row['rows']}={row['wait_ms']:.2f} ms a row let in")


if __name__ == "__main__":
    main()

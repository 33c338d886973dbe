"""How many steps are decided while the one before runs, and how long a device would wait, as prompts arrive.

    python -m benchmarks.ahead

The real scheduler and stepper; store and device are made up, and so is the time: it goes on by what a call to
the store, a plan or a launch is said to take, so every machine prints the same. What the model is given is of
an H200's order with Qwen3-8B (docs/speed.md); what comes out says how plans compare, not how a card does.
Every stream asks again as soon as it is answered. For the real thing there is `benchmarks.serve`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks import report
from benchmarks.made_up_device import Costs, Device, MadeUpClock
from services.decoder.engine.host_pages import HostPage, LocalPages, SealOrder
from services.decoder.engine.limits import Limits
from services.decoder.engine.page_hash import PageHasher
from services.decoder.engine.scheduler import Scheduler
from services.decoder.engine.sequence import Sampling
from services.decoder.engine.sequence import Sequence as Request
from services.decoder.engine.stepper import Stepper
from services.decoder.kv.device_pages import DevicePages

CALL_US, TELL_US, PAGE_US = 200, 200, 8  # the last of a match: hashed, asked for, told
COSTS = Costs(decode=5_000, token=40, plan=50, launch=80, chunk_launch=8_000)

LIMITS = Limits(
    max_rows=64,
    max_model_len=40_000,
    max_step_tokens=4096,
    max_waiting=256,
    block_tokens=16,
    page_tokens=64,
)


class Case(NamedTuple):
    """Streams, and what each of their prompts is like."""

    streams: int
    prompt: int
    known: int  # tokens of it that are every prompt's
    answer: int = 100


CASES = (
    Case(8, 4096, 0),
    Case(32, 4096, 0),
    Case(64, 4096, 0),
    Case(8, 32_768, 32_704),
    Case(32, 32_768, 32_704),
)


class SlowPages(LocalPages):
    """A store some way off."""

    def __init__(self, total: int, clock: MadeUpClock) -> None:
        super().__init__(total)
        self._clock = clock

    def match(self, page_hashes: Sequence[bytes], prompt: Sequence[int] = ()) -> list[HostPage]:
        self._clock.take(CALL_US + PAGE_US * len(page_hashes))
        return super().match(page_hashes)

    def exchange(
        self, give: list[HostPage], want: int, seals: Sequence[SealOrder] = ()
    ) -> list[HostPage] | None:
        self._clock.take(CALL_US)
        return super().exchange(give, want, seals)


@dataclass
class Found:
    """Of one case."""

    ahead: float  # share of steps
    idle_us: float  # mean, a step that continues rows
    late_us: float  # mean, before the tokens of such a step are read
    planned: dict[str, int]


def measure(case: Case, *, runs_ahead: bool, rounds: int = 4) -> Found:
    """Serve `rounds` requests a stream."""
    clock, chance = MadeUpClock(), random.Random(case.prompt)
    device = Device(clock, COSTS, runs_ahead)
    pages = case.streams * (2 + (case.prompt + case.answer) // LIMITS.page_tokens)
    hasher = PageHasher(b"model", b"decoding", LIMITS.page_tokens)
    store = SlowPages(2 * pages, clock)
    scheduler = Scheduler(LIMITS, store, DevicePages(pages), hasher, loads_beside=True)
    stepper = Stepper(scheduler, device, nullcontext())
    common, asked = [chance.randrange(9000) for _ in range(case.known)], 0

    def ask() -> None:
        nonlocal asked
        own = [chance.randrange(9000) for _ in range(case.prompt - case.known)]
        tokens = case.answer + chance.randrange(case.answer)
        scheduler.submit([Request(str(asked), 0, common + own, Sampling(), 0, tokens)])
        asked += 1

    for _ in range(case.streams):
        ask()
    while stepper.has_work:
        _, news = stepper.step()
        clock.take(TELL_US)
        for one, _ in news:
            if one.finish and asked < rounds * case.streams:
                ask()
    steps, every = max(1, len(device.waits)), sum(device.planned.values())
    return Found(
        device.planned["ahead"] / every, sum(device.waits) / steps, device.late / steps, dict(device.planned)
    )


def main() -> None:
    """Compare, print, write JSON."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    rows = []
    print("prompt  known  streams   ahead   waits (if none is ahead), us a step   tokens unread, us")
    for case in CASES:
        early, plain = (measure(case, runs_ahead=ahead) for ahead in (True, False))
        print(
            f"{case.prompt:6} {case.known:6} {case.streams:8} {early.ahead:7.1%} {early.idle_us:9.0f} "
            f"({plain.idle_us:.0f}) {early.late_us:36.0f}"
        )
        found = {"waits_us": early.idle_us, "waited_us": plain.idle_us, "unread_us": early.late_us}
        rows.append(case._asdict() | found | {"ahead": early.ahead, "planned": early.planned})
    report.write("ahead", {"cases": rows})
    print(f"steps_planned_ahead={min(row['ahead'] for row in rows):.3f} least share")


if __name__ == "__main__":
    main()

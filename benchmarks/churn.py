"""How long the host keeps a device waiting while rows make room for others, in real time.

    python -m benchmarks.churn [--cases 32768x16 131072x4] [--streams 4]

The real scheduler, stepper and store, a process of its own over gRPC; only the device is made up: it takes
the time that an H200 takes for a step of Qwen3-8B in `full` (docs/speed.md) and computes nothing. Every
prompt is known to the store but for its last page. Rows have device pages of their own, so each that ends
lets one in, whose pages are found, counted and loaded beside the steps while the other's go back: `wait_ms`
is how much longer than the step under way that kept the host, a row let in. What the runner does for it is
not in it: for that there is `benchmarks.serve`, on a card.
"""

from __future__ import annotations

import argparse
import gc
import random
from contextlib import nullcontext
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.made_up_device import Costs, Device, WallClock
from benchmarks.store import kvstore
from benchmarks.store_client import PLANES
from services.decoder.engine.limits import Limits
from services.decoder.engine.page_hash import PageHasher
from services.decoder.engine.scheduler import Scheduler
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.engine.stepper import Stepper
from services.decoder.engine.store_session import StoreSession
from services.decoder.kv.device_pages import DevicePages

PAGE_TOKENS = 64
ANSWER_TOKENS = 160
COSTS = Costs(decode=6_000, token=40, load=215)


class Case(NamedTuple):
    """So many rows of so many tokens at a time."""

    tokens: int
    rows: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """As in 32768x16."""
        tokens, _, rows = text.partition("x")
        return cls(int(tokens), int(rows))


def measure(case: Case, streams: int, costs: Costs = COSTS) -> dict[str, Any]:
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
        clock = WallClock()
        device = Device(clock, costs)
        pages = DevicePages(case.rows * (row_pages + 1))
        hasher = PageHasher(b"model", b"decoding", PAGE_TOKENS)
        scheduler = Scheduler(limits, session, pages, hasher, share_device_pages=False, loads_beside=True)
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
        begun = clock.now
        while stepper.has_work:
            stepper.step()
        seconds = 1e-6 * (clock.now - begun)
        gc.unfreeze()
        scheduler.check_integrity()
        session.close()
    let_in = count - case.rows
    return {
        "tokens": case.tokens,
        "rows": case.rows,
        "let_in": let_in,
        "steps": len(device.waits),
        "seconds": seconds,
        "wait_ms": 1e-3 * sum(device.waits) / let_in,
        "longest_ms": 1e-3 * max(device.waits),
        "wait_us_a_step": sum(device.waits) / len(device.waits),
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

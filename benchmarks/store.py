"""The store alone: page operations a second, and how long a step's calls take with 10 to 1,000 sequences.

A real kvstore process on a tmpfs, this process its client over gRPC. Every live sequence has 2,000 pages
(128K tokens at 64 a page), the first half a document; some grow, the others wait. A step fills 64 pages: one
Update with 64 seals and 64 allocations. Where a sequence has its 2,000 pages it waits from then on, another
one, any, ends with 2,000 releases in that Update, and the next step begins a new one about the same document
with a Match of 2,000 hashes, which finds the document's 1,000. Allocations evict what ended sequences left.
`update` is a step's call, `step` all calls of a step together: in one of 16 a Match as well; `ending` are the
updates with 2,000 releases. Pages have 16 bytes: the store never touches them.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.store_client import Client
from services.contract.page_header import PAGE_HEADER
from services.kvstore.page_refs import PageRef
from services.kvstore.seals import Seal

PAGES = 2_000  # a sequence
DOCUMENT = PAGES // 2  # of them, found again by the next sequence about it
ROWS = 64
SPARE = 8_000  # pages beyond those of the live sequences
_READY = re.compile(r"^kvstore ready grpc=(\S+) metrics=\S+ arena=(\S+)$", re.MULTILINE)


@dataclass
class Live:
    """A sequence and its pages so far; the last ones are open."""

    document: int
    hashes: list[bytes]  # of all its pages, once it has them
    pages: list[PageRef] = field(default_factory=list)
    sealed: int = 0

    def seals(self) -> list[Seal]:
        """Seal every open page."""
        made = [
            Seal(self.pages[at], self.hashes[at], self.pages[at - 1] if at else None)
            for at in range(self.sealed, len(self.pages))
        ]
        self.sealed = len(self.pages)
        return made


@dataclass(frozen=True)
class Step:
    """What one step came to."""

    operations: int  # pages matched, allocated, sealed and released
    update_seconds: float
    match_seconds: float  # 0.0 in most steps
    released: int  # pages, 0 in most steps


class Load:
    """The live sequences, and what a step does to them."""

    def __init__(self, client: Client, live: int) -> None:
        self._client = client
        self._random = random.Random(live)
        self._begun = 0
        self._live = [self._new(document) for document in range(live)]
        rows = min(ROWS, live // 2)
        self._growing = list(range(rows))  # places in _live
        self._share = [ROWS // rows + (row < ROWS % rows) for row in range(rows)]  # pages a step
        self._beginning: set[int] = set()
        for place, sequence in enumerate(self._live):
            # Rows begin at different lengths, so that they do not end together.
            count = DOCUMENT + DOCUMENT * (place + 1) // (rows + 1) if place < rows else PAGES
            sequence.pages, _ = client.update([], [], count)
            client.update([], sequence.seals(), 0)

    def step(self) -> Step:
        """One step."""
        found, match_seconds = 0, 0.0
        for place in self._beginning:
            sequence = self._live[place]
            sequence.pages, seconds = self._client.match(sequence.hashes)
            sequence.sealed = len(sequence.pages)
            found += sequence.sealed
            match_seconds += seconds
        self._beginning.clear()
        releases, seals, wanted = list[PageRef](), list[Seal](), list[tuple[Live, int]]()
        waiting = [place for place in range(len(self._live)) if place not in self._growing]
        for row, place in enumerate(self._growing):
            sequence = self._live[place]
            seals += sequence.seals()
            more = min(self._share[row], PAGES - len(sequence.pages))
            wanted.append((sequence, more))
            if not more:
                ended = waiting.pop(self._random.randrange(len(waiting)))
                releases += self._live[ended].pages
                self._live[ended] = self._new(self._live[ended].document)
                self._growing[row] = ended
                self._beginning.add(ended)
        total = sum(more for _, more in wanted)
        pages, seconds = self._client.update(releases, seals, total)
        for sequence, more in wanted:
            sequence.pages += pages[:more]
            pages = pages[more:]
        return Step(found + len(releases) + len(seals) + total, seconds, match_seconds, len(releases))

    def _new(self, document: int) -> Live:
        self._begun += 1
        return Live(document, [*_hashes(b"d", document), *_hashes(b"s", self._begun)])


def _hashes(kind: bytes, number: int) -> list[bytes]:
    """1,000 of them, spread as a hash function's are."""
    packed = hashlib.shake_128(kind + number.to_bytes(8, "little")).digest(16 * DOCUMENT)
    return [packed[at : at + 16] for at in range(0, len(packed), 16)]


@contextmanager
def kvstore(pages: int) -> Iterator[tuple[str, Path]]:
    """A store of that many pages, at least; its address and its arena."""
    directory = Path(tempfile.mkdtemp(prefix="hotset-store-", dir="/dev/shm"))
    arena_bytes = pages * (PAGE_HEADER.itemsize + 16) + 4 * 2**20
    command = [sys.executable, "-m", "services.kvstore", f"--arena-dir={directory / 'arena'}"]
    command += [
        f"--arena-bytes={arena_bytes}",
        "--listen=127.0.0.1:0",
        "--metrics-port=0",
        "--drain-seconds=0",
    ]
    process = subprocess.Popen([*command, "--log-level=warning"], stdout=subprocess.PIPE, text=True)
    try:
        text = ""
        while (ready := _READY.search(text)) is None:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"kvstore did not start: {text}")
            text += line
        yield ready[1], Path(ready[2])
    finally:
        process.terminate()
        process.communicate()
        shutil.rmtree(directory)


def measure(live: int, steps: int, rounds: int) -> list[dict[str, Any]]:
    """One row of figures a round; the sequences live on from round to round."""
    rows: list[dict[str, Any]] = []
    with kvstore(live * PAGES + SPARE) as (address, arena):
        client = Client(address, arena)
        load = Load(client, live)
        for _ in range(2 * SPARE // ROWS):  # until allocations evict
            load.step()
        gc.collect()
        gc.freeze()  # millions of this client's messages: its collector is not the store's time
        gc.disable()
        for round_ in range(rounds):
            start = time.perf_counter()
            done = [load.step() for _ in range(steps)]
            wall = time.perf_counter() - start
            update = np.array([step.update_seconds for step in done]) * 1e3
            match = np.array([step.match_seconds for step in done]) * 1e3
            ending = update[[step.released > 0 for step in done]]
            step_ms, operations = update + match, sum(step.operations for step in done)
            rows.append(
                {
                    "live_sequences": live,
                    "round": round_,
                    "steps": steps,
                    "ops": operations,
                    "ops_per_s": round(operations / wall),  # the client's own work included
                    "ops_per_s_in_calls": round(operations / (step_ms.sum() / 1e3)),
                    "step_p50_ms": round(float(np.percentile(step_ms, 50)), 3),
                    "step_p99_ms": round(float(np.percentile(step_ms, 99)), 3),
                    "step_max_ms": round(float(step_ms.max()), 3),
                    "update_p99_ms": round(float(np.percentile(update, 99)), 3),
                    "ending_p50_ms": round(float(np.median(ending)), 3),
                    "match_p50_ms": round(float(np.median(match[match > 0])), 3),
                    "matching_step_p50_ms": round(float(np.median(step_ms[match > 0])), 3),
                    "match_max_ms": round(float(match.max()), 3),
                }
            )
            print(rows[-1], flush=True)
        gc.enable()
        gc.unfreeze()
        client.close()
    return rows


def main() -> None:
    """Measure, print a line a round and the closing lines, write results/store.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--live", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5, help="the quietest counts; all are kept")
    wanted = parser.parse_args()
    rows = [row for live in wanted.live for row in measure(live, wanted.steps, wanted.rounds)]
    best = {live: min(_of(rows, live), key=lambda row: row["step_p99_ms"]) for live in wanted.live}
    few, many = best[min(best)], best[max(best)]
    # The quietest round by its own figure each: what shares the cores makes a tail, not the store.
    update_p99 = {live: min(row["update_p99_ms"] for row in _of(rows, live)) for live in wanted.live}
    figures = {f"store_step_p50_at_{live}": (row["step_p50_ms"], "ms") for live, row in best.items()}
    figures |= {f"store_step_p99_at_{live}": (row["step_p99_ms"], "ms") for live, row in best.items()}
    figures |= {f"store_ops_per_s_at_{live}": (row["ops_per_s"], "1/s") for live, row in best.items()}
    figures |= {f"store_update_p99_at_{live}": (p99, "ms") for live, p99 in update_p99.items()}
    # The longest kinds of step, in the middle: a tail is the machine's, these are the store's.
    for name in ("ending_p50_ms", "matching_step_p50_ms"):
        for live in wanted.live:
            least = min(row[name] for row in _of(rows, live))
            figures[f"store_{name.removesuffix('_ms')}_at_{live}"] = (least, "ms")
    figures["store_update_p99_ratio"] = (round(update_p99[max(best)] / update_p99[min(best)], 2), "x")
    figures["store_step_p99_ratio"] = (round(many["step_p99_ms"] / few["step_p99_ms"], 2), "x")
    figures["store_step_p50_ratio"] = (round(many["step_p50_ms"] / few["step_p50_ms"], 2), "x")
    figures["store_step_p99"] = (many["step_p99_ms"], "ms")
    figures["store_update_p99"] = (update_p99[max(best)], "ms")
    figures["store_ops_per_s"] = (many["ops_per_s"], "1/s")
    closing = {name: f"{value} {unit}" for name, (value, unit) in figures.items()}
    path = report.write("store", {"pages_a_sequence": PAGES, "figures": closing, "rounds": rows})
    print(f"results in {path}")
    for name, text in closing.items():
        print(f"{name}={text}")


def _of(rows: list[dict[str, Any]], live: int) -> list[dict[str, Any]]:
    return [row for row in rows if row["live_sequences"] == live]


if __name__ == "__main__":
    main()

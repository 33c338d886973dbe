"""`make soak`: random requests and aborts on tiny pools for minutes; at the end everything is back in place.

    python -m tests.soak [--minutes 10] [--seed 0]

A real kvstore, a real engine and a tiny random model, spoken to over gRPC as the front does. Prompts share
beginnings, some requests have several choices, some are aborted at any stage. The same request must always
get the same tokens. At the end no page, row or slot is held, no integrity was violated, and the engine's
memory has stopped growing.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
from hotset.v1 import engine_pb2 as pb

from tests.decoder import checkpoints
from tests.engine.processes import Engine, Keeper, KvStore, eventually

CLIENTS = 6
KINDS = 40  # different requests; each comes again and again
GROWTH_BYTES = 32 * 2**20
_WARM_SHARE = 0.4  # of the time, before memory counts


@dataclass
class Traffic:
    """What clients have asked and got."""

    engine: Engine
    answers: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # (kind, choice) -> its tokens
    finished: int = 0
    aborted: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)

    def client(self, number: int, seed: int, until: float) -> None:
        """One request after the other."""
        chance, count = random.Random(f"{seed} {number}"), 0
        while time.monotonic() < until:
            count += 1
            kind, name = chance.randrange(KINDS), f"{number}-{count}"
            request = made(kind, name)
            try:
                self.engine.stub.Submit(request, timeout=30)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    self.wrong.append(f"{name}: {error.code()} {error.details()}")
                self.refused += 1
                time.sleep(0.05)
                continue
            if chance.random() < 0.3:
                time.sleep(chance.random() * 0.2)
                self.engine.stub.Abort(pb.AbortRequest(request_id=name), timeout=30)
            for choice in request.choices:
                self.compare(kind, name, choice.index)

    def compare(self, kind: int, name: str, choice: int) -> None:
        """Wait for the end of a choice and see that its tokens are those that its kind always gets."""
        tokens = self.engine.answer(name, choice)
        last = self.engine.events.pop((name, choice))[-1]
        known = self.answers.get((kind, choice))
        if last.finish_reason == pb.FINISH_REASON_ABORT:
            self.aborted += 1
            right = known is None or known[: len(tokens)] == tokens
        else:
            self.finished += 1
            right = self.answers.setdefault((kind, choice), tokens) == tokens
        if not right or last.finish_reason == pb.FINISH_REASON_ERROR:
            self.wrong.append(f"{name} kind {kind} choice {choice}: {last.error or tokens[:8]}")


def made(kind: int, name: str) -> pb.SubmitRequest:
    """The request of a kind; every fourth kind begins alike."""
    chance, common = random.Random(f"kind {kind}"), random.Random(f"common {kind % 4}")
    prompt = [common.randrange(200) for _ in range(chance.randint(1, 300))]
    prompt += [chance.randrange(200) for _ in range(chance.randint(1, 60))]
    return pb.SubmitRequest(
        request_id=name,
        prompt_tokens=prompt,
        choices=[pb.Choice(index=i, seed=kind + i) for i in range(chance.choice([1, 1, 1, 3]))],
        sampling=pb.SamplingParams(temperature=chance.choice([0.0, 0.8]), top_p=1.0, repetition_penalty=1.0),
        max_tokens=chance.randint(1, 60),
        priority=chance.choice([0, 0, 1]),
        ignore_eos=True,
    )


def run(engine: Engine, minutes: float, seed: int) -> tuple[Traffic, int]:
    """The traffic, and by how many bytes the engine grew once it was warm."""
    traffic, process = Traffic(engine), psutil.Process(engine.popen.pid)
    until = time.monotonic() + 60 * minutes
    clients = [
        threading.Thread(target=traffic.client, args=(number, seed, until)) for number in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    time.sleep(60 * minutes * _WARM_SHARE)
    warm = process.memory_info().rss
    for client in clients:
        client.join()
    eventually("everything has come back", engine.idle, seconds=30)
    return traffic, process.memory_info().rss - warm


def main() -> int:
    """Run, say what came of it; 1 if anything is off."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    keep = Keeper()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        try:
            store = keep(KvStore(Path(directory) / "arena", 8 * 2**20))
            engine = keep(
                Engine(
                    Path(directory) / "e.sock",
                    checkpoints.save(Path(directory) / "model", "llama"),
                    store.address,
                    dtype="float32",
                    max_rows=4,
                    max_model_len=448,
                    max_waiting=16,
                    budget_tokens=64,
                    max_step_tokens=64,
                    device_cache_tokens=1024,
                )
            )
            engine.wait_ready()
            traffic, grown = run(engine, wanted.minutes, wanted.seed)
            stats, pages = engine.stats(), store.stats()
        finally:
            keep.clear_away()
    print(f"finished={traffic.finished} aborted={traffic.aborted} refused={traffic.refused}")
    print(f"prompt_tokens={stats.prompt_tokens} cached_prompt_tokens={stats.cached_prompt_tokens}")
    print(f"rows_parked={stats.rows_parked} pages_given_up={stats.pages_given_up}")
    print(
        f"open_pages={pages.open_pages} sealed_pages={pages.sealed_pages} cached_pages={pages.cached_pages}"
    )
    print(f"integrity_violations={stats.integrity_violations} grown_mib={grown / 2**20:.1f}")
    for line in traffic.wrong[:20]:
        print(f"wrong: {line}")
    held = pages.open_pages or pages.sealed_pages
    sound = not (traffic.wrong or held or stats.integrity_violations) and grown < GROWTH_BYTES
    print(f"soak={'passed' if sound and traffic.finished else 'FAILED'}")
    return 0 if sound and traffic.finished else 1


if __name__ == "__main__":
    raise SystemExit(main())

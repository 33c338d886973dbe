"""Two nodes, one prompt: what an engine computed beside one store is not computed again beside another.

Each node has an arena, a store and an engine of its own. In namespaces the two reach each other over a cable
only, which can be pulled out.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.settings import DecoderSettings
from tests.decoder import checkpoints
from tests.engine.processes import FLAGS, Engine, Keeper, KvStore, eventually
from tests.kvstore.pair import REST_SECONDS
from tests.two_hosts import Host, two_hosts

ARENA_BYTES = 16 * 2**20
TRANSPORTS = {
    "mapped": ("--data-transport=mapped",),
    "tcp": ("--data-transport=tcp",),
    "ucx-shm": ("--data-transport=ucx", "--ucx-tls=sm,self", "--ucx-lanes=shm"),
}


def prompt(number: int) -> list[int]:
    return [3 + (7 * i * i + number * i) % 200 for i in range(300)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def answers(tiny: Path) -> list[list[int]]:
    """What one engine alone says to prompts 0, 1, 2 ...; 20 tokens each."""
    engine = OfflineEngine(
        DecoderSettings.model_validate({"model": tiny, **FLAGS, "prefix_cache": False}), ARENA_BYTES
    )
    told = []
    for number in range(8):
        sequence = Sequence("r", 0, prompt(number), Sampling(), seed=1, max_tokens=20)
        engine.generate([sequence])
        told.append(sequence.generated)
    return told


class Node:
    """A store and an engine beside it."""

    def __init__(self, keep: Keeper, store: KvStore, engine: Engine) -> None:
        self.store, self.engine = keep(store), keep(engine)
        engine.wait_ready()
        self.asked = 0

    def says(self, number: int) -> tuple[list[int], int]:
        """The answer to a prompt, and how many of its tokens were not computed."""
        self.asked += 1
        name = f"{number}-{self.asked}"
        self.engine.submit(name, prompt(number), 20)
        answer = self.engine.answer(name)
        eventually("the pages are back", self.engine.idle)
        return answer, self.engine.events[name, 0][0].cached_prompt_tokens


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_prefix_computed_here_is_not_computed_there(
    shm: Path, keep: Keeper, tiny: Path, answers: list[list[int]], transport: str
) -> None:
    flags = TRANSPORTS[transport]
    store = KvStore(shm / "a", ARENA_BYTES, flags=flags)
    first = Node(keep, store, Engine(shm / "a.sock", tiny, store.address, **FLAGS))
    store = KvStore(shm / "b", ARENA_BYTES, flags=(*flags, f"--peers={first.store.address}"))
    second = Node(keep, store, Engine(shm / "b.sock", tiny, store.address, **FLAGS))
    assert first.says(0) == (answers[0], 0)
    assert second.says(0) == (answers[0], 256)  # four pages of 64 that lie in the other arena
    assert second.engine.stats().prompt_tokens == 300 - 256
    assert second.says(0) == (answers[0], 256)  # here now
    assert second.says(1) == (answers[1], 0)  # nobody has it
    assert "pulled peer=" in second.store.text
    first.engine.submit("prefill", prompt(3), 1)  # one node reads the prompt, the other answers
    assert first.engine.answer("prefill") == answers[3][:1]
    eventually("the pages are back", first.engine.idle)
    assert second.says(3) == (answers[3], 256)
    first.store.end(signal.SIGKILL)
    assert second.says(2) == (answers[2], 0)  # nobody answers any more
    for state in ("open_pages", "sealed_pages"):
        assert getattr(second.store.stats(), state) == 0


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as made:
        yield made


def _addresses(host: Host) -> tuple[str, ...]:
    return (
        *("--data-transport=ucx", "--ucx-tls=tcp,self", f"--ucx-devices={host.device}", "--ucx-lanes=tcp"),
        "--pull-seconds=1.0",
    )


def _engine_in(host: Host) -> type[Engine]:
    class EngineThere(Engine):
        before = host.before

    return EngineThere


def test_over_a_cable_that_is_pulled_out_and_back_in(
    hosts: tuple[Host, Host], shm: Path, keep: Keeper, tiny: Path, answers: list[list[int]]
) -> None:
    here, there = hosts
    nodes = []
    for host, more in ((here, ()), (there, (f"--peers={here.address}:7700",))):
        store = KvStore(
            shm / host.device,
            ARENA_BYTES,
            listen=f"{host.address}:7700",
            flags=(*_addresses(host), *more),
            before=host.before,
        )
        socket = shm / f"{host.device}.sock"
        nodes.append(Node(keep, store, _engine_in(host)(socket, tiny, store.address, **FLAGS)))
    first, second = nodes
    for number in range(7):
        assert first.says(number) == (answers[number], 0)
    assert second.says(0) == (answers[0], 256)

    there.link("down")
    start = time.monotonic()
    assert second.says(1) == (answers[1], 0)  # computed, after a second of waiting for the other
    assert time.monotonic() - start < 60
    assert "pull_failed" in second.store.text
    there.link("up")

    def pulled() -> int:
        return sum(map(int, re.findall(r"pulled peer=\S+ pages=(\d+)", second.store.text)))

    before, number = pulled(), 2
    deadline = time.monotonic() + 30
    while (
        pulled() == before
    ):  # a peer that failed is left alone for a while, and gRPC looks again each second
        assert time.monotonic() < deadline
        time.sleep(REST_SECONDS)
        answer, _ = second.says(number)
        assert answer == answers[number]
        number += 1
    first.store.send(signal.SIGSTOP)
    assert second.says(7) == (answers[7], 0)
    first.store.send(signal.SIGCONT)
    eventually("nothing is held there", lambda: first.engine.idle())

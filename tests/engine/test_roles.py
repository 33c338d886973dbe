"""One server reads a prompt, another one answers: stores, engines and fronts as operators start them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.processes import Keeper, KvStore, Process, eventually
from tests.front.real import tiny_model
from tests.two_hosts import Host, two_hosts

pytestmark = pytest.mark.slow
ARENA_BYTES = 64 * 2**20
PROMPT = [5 + (7 * i * i) % 900 for i in range(300)]
_ASK = """
import sys, urllib.request
url, body = sys.argv[1:]
data = body.encode() if body else None
request = urllib.request.Request(url, data, {"content-type": "application/json"})
print(urllib.request.urlopen(request, timeout=120).read().decode())
"""


class Node:
    """A store and a server beside it, perhaps in a namespace, where it is asked too."""

    def __init__(
        self,
        keep: Keeper,
        directory: Path,
        model: Path,
        *,
        address: str,
        before: Sequence[str],
        store: Sequence[str],
        front: Sequence[str],
    ) -> None:
        self._before = before
        listen = f"{address}:{0 if address == '127.0.0.1' else 7700}"
        self.store = keep(KvStore(directory, ARENA_BYTES, listen=listen, flags=store, before=before))
        flags = ("--served-model-name=tiny", "--dtype=float32", "--threads=1", "--budget-tokens=32")
        sizes = ("--max-rows=2", "--max-model-len=1024", "--max-step-tokens=128")
        where = (f"--kvstore={self.store.address}", f"--host={address}", "--port=0")
        program = ["-m", "services.decoder", f"--model={model}"]
        self.front = keep(Process([*program, *flags, *sizes, *where, *front], before))
        self.url = self.front.read_until(re.compile(r"event=listening url=(\S+)"))[1]
        eventually("it serves", lambda: "event=engine_serves" in self.front.text)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> str:
        command = [
            *self._before,
            sys.executable,
            "-c",
            _ASK,
            self.url + path,
            json.dumps(body) if body else "",
        ]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=180).stdout

    def says(self, cache_salt: str) -> tuple[str, int]:
        """The answer, and how many tokens of the prompt were found under that salt."""
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        body["cache_salt"] = cache_salt
        answer = json.loads(self.ask("/v1/completions", body))
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"), default_model)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as made:
        yield made


def hand_over(reads: Node, decodes: Node) -> None:
    """The second one answers what the first one has read, and without it too."""
    answer, cached = decodes.says("one")
    assert cached == 256, "four pages of 64 came from the other node"
    assert "event=prefilled " in decodes.front.text
    assert "pulled peer=" in decodes.store.text
    assert decodes.says("one") == (answer, 256)
    reads.front.end()
    assert decodes.says("other") == (answer, 0), "nothing changes by where it was read"
    assert "event=prefill_failed" in decodes.front.text


@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_on_one_machine(shm: Path, keep: Keeper, tiny: Path, transport: str) -> None:
    here = {"address": "127.0.0.1", "before": ()}
    data = f"--data-transport={transport}"
    reads = Node(keep, shm / "a", tiny, **here, store=(data,), front=("--prefill-only",))  # type: ignore[arg-type]  # by name
    peers = f"--peers={reads.store.address}"
    front = (f"--decode-from={reads.url}",)
    decodes = Node(keep, shm / "b", tiny, **here, store=(data, peers), front=front)  # type: ignore[arg-type]  # by name
    hand_over(reads, decodes)
    decodes.front.end()
    eventually("nothing is held", lambda: decodes.store.stats().sealed_pages == 0)


@pytest.mark.timeout(600)
def test_on_two_hosts(hosts: tuple[Host, Host], shm: Path, keep: Keeper, tiny: Path) -> None:
    one, other = hosts

    def data(host: Host) -> tuple[str, ...]:
        ucx = (
            "--data-transport=ucx",
            "--ucx-tls=tcp,self",
            f"--ucx-devices={host.device}",
            "--ucx-lanes=tcp",
        )
        return (*ucx, "--pull-seconds=1.5")

    reads = Node(
        keep,
        shm / "a",
        tiny,
        address=one.address,
        before=one.before,
        store=data(one),
        front=("--prefill-only",),
    )
    decodes = Node(
        keep,
        shm / "b",
        tiny,
        address=other.address,
        before=other.before,
        store=(*data(other), f"--peers={reads.store.address}"),
        front=(f"--decode-from={reads.url}",),
    )
    hand_over(reads, decodes)

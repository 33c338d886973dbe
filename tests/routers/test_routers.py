"""Two nodes, each a store and a decoder, behind each router: prefixes, a death under load, KV events."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.engine.processes import eventually
from tests.front.live import MODEL
from tests.front.real import Service, real_service, tiny_model
from tests.routers.router import COMMANDS, router

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ARENA_BYTES = 64 * 2**20
EVENTS = ("--kv-events=tcp://127.0.0.1:0", "--kv-events-replay=tcp://127.0.0.1:0")
PAGE_TOKENS = 64
CLIENTS = 6
ANSWER_TOKENS = 8
CACHED = "hotset_cached_prompt_tokens_total"
COMPUTED = "hotset_prompt_tokens_total"
WORDS = ("amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "heron", "ivory", "jetty", "knoll")
Usage = dict[str, Any]


@pytest.fixture(scope="module")
def nodes(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Service]]:
    model = tiny_model(tmp_path_factory.mktemp("tiny"), default_model)
    with ExitStack() as stack:
        yield [stack.enter_context(real_service(model, ARENA_BYTES, EVENTS)) for _ in range(2)]


def conversation(number: int) -> dict[str, Any]:
    """A prompt of some hundred tokens that has nothing but its template in common with others."""
    chance = random.Random(number)
    text = " ".join(chance.choice(WORDS) for _ in range(200))
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4}


def ask(url: str, number: int) -> Usage:
    response = httpx.post(f"{url}/v1/chat/completions", json=conversation(number), timeout=120)
    assert response.status_code == 200, response.text
    usage: Usage = response.json()["usage"]
    return usage


def metric(nodes: Sequence[Service], name: str) -> list[float]:
    return [node.metric(name) for node in nodes]


def whole_pages(usage: Usage) -> int:
    """Tokens of a prompt that a second request like it need not compute."""
    tokens: int = usage["prompt_tokens"]
    return (tokens - 1) // PAGE_TOKENS * PAGE_TOKENS


def check_prefixes(url: str, nodes: Sequence[Service], numbers: Sequence[int]) -> None:
    """What comes again comes to where it was computed, and both nodes compute."""
    before = metric(nodes, CACHED)
    computed = metric(nodes, COMPUTED)
    with ThreadPoolExecutor(len(numbers)) as pool:  # at once, or an idle node has no reason to get any
        first = dict(zip(numbers, pool.map(lambda number: ask(url, number), numbers), strict=True))
    shared = sum(metric(nodes, CACHED)) - sum(before)
    assert shared < len(numbers) * PAGE_TOKENS, "the prompts have too much in common to show anything"
    assert all(now > then for now, then in zip(metric(nodes, COMPUTED), computed, strict=True))
    for _ in range(2):
        for number, usage in first.items():
            again = ask(url, number)
            assert again["prompt_tokens_details"]["cached_tokens"] == whole_pages(usage)
    hits = sum(metric(nodes, CACHED)) - sum(before) - shared
    assert hits == 2 * sum(map(whole_pages, first.values()))


@dataclass
class Asked:
    began: float
    failure: str = ""


class Load:
    """Clients that ask one thing after another until they are told to stop."""

    def __init__(self, url: str, clients: int) -> None:
        self.asked: list[Asked] = []
        self._url = url
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(clients)
        self._clients = [self._pool.submit(self._client, client) for client in range(clients)]

    def since(self, moment: float) -> int:
        """Requests that were sent and answered since."""
        return sum(one.began > moment for one in self.asked)

    def stop(self) -> None:
        self._stop.set()
        for client in self._clients:
            client.result()
        self._pool.shutdown()

    def _client(self, client: int) -> None:
        while not self._stop.is_set():
            one = Asked(time.monotonic())
            body = conversation(1000 + client) | {"max_tokens": ANSWER_TOKENS, "ignore_eos": True}
            try:
                answer = httpx.post(f"{self._url}/v1/chat/completions", json=body, timeout=120)
                if answer.status_code != 200:
                    one.failure = f"{answer.status_code} {answer.text}"
                elif answer.json()["usage"]["completion_tokens"] != ANSWER_TOKENS:
                    one.failure = f"half an answer: {answer.text}"
            except httpx.HTTPError as error:
                one.failure = repr(error)
            self.asked.append(one)


def check_death(url: str, nodes: Sequence[Service]) -> None:
    """A decoder is killed, its engine with it: what it had under way may fail, and nothing else."""
    load = Load(url, CLIENTS)
    try:
        eventually("both work", lambda: all(metric(nodes, "hotset_requests_running")))
        dead = nodes[0].front.popen
        engine = psutil.Process(dead.pid).children()
        dead.kill()
        killed = time.monotonic()
        eventually("everyone has asked again", lambda: load.since(killed) >= 2 * CLIENTS, 240)
    finally:
        load.stop()
    failed = [one for one in load.asked if one.failure]
    assert all(one.began < killed for one in failed), [one.failure for one in failed]
    assert len(failed) <= CLIENTS
    psutil.wait_procs(engine, 30)
    eventually("its store has everything back", lambda: nodes[0].held_pages() == 0)
    nodes[0].start_front_again()  # and says 503 until its engine serves, which is no client's trouble
    fresh = iter(range(10_000, 2**40))

    def takes_part() -> bool:
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(lambda number: ask(url, number), [next(fresh) for _ in range(CLIENTS)]))
        return nodes[0].metric(COMPUTED) > 0

    eventually("the router sends it requests again", takes_part, 240)


@pytest.mark.parametrize("kind", COMMANDS)
def test_two_nodes_behind_a_router(kind: str, nodes: list[Service]) -> None:
    # Prefixes come first as long as no node has two requests more than the other.
    flags = ("--policy", "cache_aware", "--balance-abs-threshold", "2", "--balance-rel-threshold", "1.1")
    with router(kind, [node.url for node in nodes], *flags) as url:
        start = 20 * list(COMMANDS).index(kind)
        check_prefixes(url, nodes, range(start, start + 12))
        check_death(url, nodes)


def test_a_router_that_listens_to_kv_events_finds_what_it_never_sent(nodes: list[Service]) -> None:
    """Each node computes some prompts unseen by the router, which then sends each to where it lies."""
    flags = ["--policy", "kv_aware", "--kv-event-block-size", str(PAGE_TOKENS), "--kv-event-model", MODEL]
    for node in nodes:
        live, replay = re.findall(r"^kv events (\S+)$", node.store.text, re.MULTILINE)
        flags += ["--kv-event-source", f"{node.url}={live}"]
        flags += ["--kv-event-replay-source", f"{node.url}={replay}"]
    with router("vllm", [node.url for node in nodes], *flags) as url:
        # Until its subscriptions have arrived: what it did not hear of, it does not find.
        fresh = iter(range(100, 10_000))

        def heard(node: Service) -> bool:
            number = next(fresh)
            usage = ask(node.url, number)
            time.sleep(0.5)
            before = node.metric(CACHED)
            ask(url, number)
            return node.metric(CACHED) - before == whole_pages(usage)

        for node in nodes:
            for _ in range(2):  # once may be chance
                eventually("the router hears of a node", lambda node=node: heard(node))  # type: ignore[misc]  # mypy cannot type a default of a lambda
        known = {number: ask(nodes[number % 2].url, number) for number in range(60, 68)}
        time.sleep(2)
        before = metric(nodes, CACHED)
        for number, usage in known.items():
            assert ask(url, number)["prompt_tokens_details"]["cached_tokens"] == whole_pages(usage)
        hits = [now - then for now, then in zip(metric(nodes, CACHED), before, strict=True)]
        right = [sum(whole_pages(known[number]) for number in known if number % 2 == node) for node in (0, 1)]
        assert hits == right

"""Front, engine and kvstore as they are, killed under eight streams: the tokens of an undisturbed run."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.decoder import checkpoints
from tests.engine.conftest import directory_on_tmpfs
from tests.engine.processes import Keeper, KvStore, Process, eventually
from tests.front.live import chat_body, chunks_of

ARENA_BYTES = 64 * 2**20
LONG = "It was a bright cold day in April, and the clocks were striking thirteen. " * 30


def _chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", chat_body(**fields)


def _complete(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": "fake"} | fields


STREAMS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "greedy": _chat(temperature=0),
    "sampled": _chat(seed=5, temperature=0.9, top_p=0.95, min_p=0.01),
    "penalties": _chat(seed=6, frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.2),
    "log probabilities": _chat(seed=7, logprobs=True, top_logprobs=3),
    "choices": _chat(seed=8, n=2),
    "a stop text": _chat(seed=9),  # the text is one that comes; see _with_stop
    "echo": _complete(prompt=["a b c", "d e"], echo=True, logprobs=2, seed=10),
    "a long prompt": _complete(prompt=LONG, seed=11, min_tokens=100),
}
"""Ten choices, more than there are rows."""


@dataclass
class Choice:
    text: str = ""
    finish: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)


@dataclass
class Service:
    store: KvStore
    front: Process
    url: str
    keep: Keeper

    @property
    def engine(self) -> psutil.Process:
        (engine,) = psutil.Process(self.front.popen.pid).children()
        return engine

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    def ask(self, path: str, body: Mapping[str, Any]) -> tuple[dict[int, Choice], Any]:
        """Each choice of a streamed answer, and its usage."""
        wanted = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        # A few likely tokens to draw from: random weights leave thousands that are as good as equal, whose
        # order depends on a batch's rounding, and a restart changes batches.
        wanted |= {"max_tokens": 150, "temperature": 0.7, "top_k": 4}
        response = httpx.post(f"{self.url}{path}", json=wanted | dict(body), timeout=120)
        assert response.status_code == 200, response.text
        choices: dict[int, Choice] = {}
        usage: dict[str, Any] = {}
        for chunk in chunks_of(response):
            usage = chunk["usage"] or usage
            for part in chunk["choices"]:
                choice = choices.setdefault(part["index"], Choice())
                choice.text += (part["delta"].get("content") or "") if "delta" in part else part["text"]
                choice.finish = part["finish_reason"] or choice.finish
                told = part["logprobs"] or {}
                choice.tokens += told.get("tokens", []) + [one["token"] for one in told.get("content", [])]
                choice.logprobs += told.get("token_logprobs", [])
                choice.logprobs += [one["logprob"] for one in told.get("content", [])]
        del usage["prompt_tokens_details"]  # a second run finds prompts in the prefix cache
        return choices, usage

    def ask_all(self, streams: Mapping[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        with ThreadPoolExecutor(len(streams)) as pool:
            asked = {name: pool.submit(self.ask, *request) for name, request in streams.items()}
            return {name: answer.result() for name, answer in asked.items()}


@pytest.fixture(scope="module")
def service(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A model of random weights that speaks the bundled model's tokens: quick, and it says everything."""
    model = checkpoints.save(
        tmp_path_factory.mktemp("tiny"), "llama", vocab_size=49152, max_position_embeddings=2048
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        if (default_model / name).exists():
            shutil.copy(default_model / name, model)
    keep = Keeper()
    with directory_on_tmpfs() as shm:
        try:
            store = keep(KvStore(shm / "arena", ARENA_BYTES))
            flags = {"kvstore": store.address, "port": 0, "served-model-name": "fake", "dtype": "float32"}
            # A budget for everything, for the same reason: equally good blocks would be chosen by rounding.
            sizes = {"max-rows": 6, "max-step-tokens": 64, "budget-tokens": 1024, "threads": 1}
            given = [f"--{name}={value}" for name, value in (flags | sizes).items()]
            front = keep(Process(["-m", "services.decoder", f"--model={model}", *given]))
            url = front.read_until(re.compile(r"event=listening url=(\S+)"))[1]
            eventually("it serves", lambda: httpx.get(f"{url}/ready").status_code == 200)
            yield Service(store, front, url, keep)
        finally:
            keep.clear_away()


@pytest.fixture(scope="module")
def streams(service: Service) -> Mapping[str, tuple[str, dict[str, Any]]]:
    """With a stop text that comes after two thirds of its answer."""
    path, body = STREAMS["a stop text"]
    text = service.ask(path, body)[0][0].text
    return {**STREAMS, "a stop text": (path, body | {"stop": [text[len(text) * 2 // 3 :][:6]]})}


@pytest.fixture(scope="module")
def undisturbed(service: Service, streams: Mapping[str, Any]) -> dict[str, Any]:
    answers = service.ask_all(streams)
    assert answers["a stop text"][0][0].finish == "stop"
    assert answers["greedy"][1]["completion_tokens"] == 150
    return answers


def _kill_engine(service: Service) -> None:
    service.engine.kill()


def _kill_store(service: Service) -> None:
    service.store.end(signal.SIGKILL)
    service.store = service.keep(service.store.again())


def _kill_both(service: Service) -> None:
    service.engine.kill()
    _kill_store(service)


@pytest.mark.parametrize(
    ("kill", "after_tokens", "restarts"),
    [(_kill_engine, 1, 1), (_kill_engine, 400, 1), (_kill_both, 250, 1), (_kill_store, 200, 0)],
    ids=["engine, early", "engine, later", "both", "store"],
)
def test_killed_under_eight_streams(
    service: Service,
    streams: Mapping[str, Any],
    undisturbed: Mapping[str, Any],
    kill: Callable[[Service], None],
    after_tokens: int,
    restarts: int,
) -> None:
    told = service.metric("hotset_generation_tokens_total")
    lives = service.metric("hotset_engine_restarts_total")
    taken_along = service.metric("hotset_requests_resubmitted_total")
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(service.ask_all, streams)
        waiting, running = "hotset_requests_waiting", "hotset_requests_running"
        eventually("all are there", lambda: service.metric(waiting) + service.metric(running) == 10)
        eventually(
            "they answer", lambda: service.metric("hotset_generation_tokens_total") >= told + after_tokens
        )
        if after_tokens == 1:
            assert service.metric(waiting) > 0, "there was a row for everyone"
        kill(service)
        answers = asked.result()
    for name, (choices, usage) in undisturbed.items():
        found, found_usage = answers[name]
        assert found.keys() == choices.keys()
        for index, right in choices.items():
            assert found[index].text == right.text, name
            assert (found[index].finish, found[index].tokens) == (right.finish, right.tokens), name
            assert found[index].logprobs == pytest.approx(right.logprobs, abs=1e-3), name
        assert found_usage == usage, name
    assert service.metric("hotset_engine_restarts_total") == lives + restarts
    assert (service.metric("hotset_requests_resubmitted_total") > taken_along) == bool(restarts)
    eventually("the engine is idle", lambda: service.metric("hotset_requests_running") == 0)
    assert "Traceback" not in service.front.text

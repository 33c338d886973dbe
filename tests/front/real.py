"""Front, engine and kvstore as they are, around a tiny model that speaks the bundled model's tokens."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.decoder import checkpoints
from tests.engine.conftest import directory_on_tmpfs
from tests.engine.processes import Keeper, KvStore, Process, eventually
from tests.front.live import chunks_of

LISTENING = re.compile(r"event=listening url=(\S+)")


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
    command: list[str]

    def start_front_again(self) -> None:
        """At the same address, after the last one has ended; it listens, and its engine is still to start."""
        port = self.url.rsplit(":", 1)[1]
        self.front = self.keep(Process([*self.command, f"--port={port}"]))
        self.front.read_until(LISTENING)

    @property
    def engine(self) -> psutil.Process:
        (engine,) = psutil.Process(self.front.popen.pid).children()
        return engine

    def has_engine_after(self, pid: int) -> bool:
        """Whether another one than `pid` serves."""
        engines = psutil.Process(self.front.popen.pid).children()
        ready = httpx.get(f"{self.url}/ready", timeout=30).status_code == 200
        return ready and [engine.pid for engine in engines] != [pid]

    def held_pages(self) -> int:
        """Pages of the store that anybody holds."""
        now = self.store.stats()
        return now.open_pages + now.sealed_pages

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


def tiny_model(path: Path, default_model: Path) -> Path:
    """A model of random weights: quick, and it says everything."""
    model = checkpoints.save(path, "llama", vocab_size=49152, max_position_embeddings=2048)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        if (default_model / name).exists():
            shutil.copy(default_model / name, model)
    return model


@contextmanager
def real_service(
    model: Path, arena_bytes: int, store_flags: Sequence[str] = (), /, **sizes: object
) -> Iterator[Service]:
    """Started, ready, and cleared away."""
    keep = Keeper()
    with directory_on_tmpfs() as shm:
        try:
            store = keep(KvStore(shm / "arena", arena_bytes, flags=store_flags))
            flags = {"kvstore": store.address, "port": 0, "served-model-name": "fake", "dtype": "float32"}
            # A budget for everything, for the same reason: equally good blocks would be chosen by rounding.
            usual = {"max-rows": 6, "max-step-tokens": 64, "budget-tokens": 1024, "threads": 1}
            given = [f"--{name.replace('_', '-')}={value}" for name, value in (flags | usual | sizes).items()]
            command = ["-m", "services.decoder", f"--model={model}", *given]
            front = keep(Process(command))
            url = front.read_until(LISTENING)[1]
            eventually("it serves", lambda: httpx.get(f"{url}/ready").status_code == 200)
            yield Service(store, front, url, keep, command)
        finally:
            keep.clear_away()

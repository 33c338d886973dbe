"""kvstore, decoder and Prometheus, all real, and clients that keep them busy.

Knows how to start them and what to ask; what is looked at in them is the tests' affair.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
from hotset.v1 import kvstore_pb2

from tests.front.real import Service, real_service
from tests.observe.programs import Programs
from tests.observe.prometheus import Prometheus, running_prometheus

_METRICS = re.compile(r"kvstore ready grpc=\S+ metrics=(\S+)")
_ARENA_BYTES = 512 * 2**20  # of the bundled model 11,000 tokens; what is not written to takes no memory
_SIZES: dict[str, object] = {
    "max_rows": 3,
    "max_model_len": 2048,
    "max_step_tokens": 256,
    "budget_tokens": 128,
    "hot_tokens": 160,
    "hot_bytes": 0,
}
"""Rows have slots for a tenth of a prompt, so that something is missed."""


@dataclass
class Stack:
    service: Service
    prometheus: Prometheus
    arena_metrics: str  # URL

    @property
    def metrics(self) -> tuple[str, str]:
        """URLs of both services' figures."""
        return f"{self.service.url}/metrics", self.arena_metrics

    def ask(self, prompt_tokens: int, max_tokens: int, first: int = 100) -> None:
        """A completion whose prompt is a run of the vocabulary from `first` on."""
        body = {
            "model": "fake",
            "prompt": [(first + 7 * at) % 40000 + 100 for at in range(prompt_tokens)],
            "max_tokens": max_tokens,
            "temperature": 0.8,
            "ignore_eos": True,
        }
        response = httpx.post(f"{self.service.url}/v1/completions", json=body, timeout=300)
        assert response.status_code == 200, response.text

    def misbehave(self) -> None:
        """An answer of 4xx, and a call that the store refuses."""
        wrong = httpx.post(f"{self.service.url}/v1/completions", json={"model": "fake"}, timeout=60)
        assert 400 <= wrong.status_code < 500
        nowhere = kvstore_pb2.HeartbeatRequest(session_id=12345)
        try:
            self.service.store.stub.Heartbeat(nowhere, timeout=60)
        except grpc.RpcError:
            return
        raise AssertionError("the store knows a session that nobody opened")


@contextmanager
def running_stack(model: Path, directory: Path, programs: Programs) -> Iterator[Stack]:
    """Started and ready."""
    with real_service(model, _ARENA_BYTES, **_SIZES) as service:
        found = _METRICS.search(service.store.text)
        assert found is not None, service.store.text
        targets = {
            "hotset-decoder": [service.url.removeprefix("http://")],
            "hotset-kvstore": [found[1]],
        }
        with running_prometheus(programs.prometheus, directory, targets) as prometheus:
            yield Stack(service, prometheus, f"http://{found[1]}/metrics")


@contextmanager
def under_load(stack: Stack, prompt_tokens: int, max_tokens: int) -> Iterator[None]:
    """Four clients over three rows, who ask again once they have an answer, and one who asks for nonsense."""
    ends = threading.Event()

    def ask(client: int) -> None:
        turn = 0
        while not ends.is_set():
            stack.ask(prompt_tokens, max_tokens, first=1000 * client + turn // 2)  # every other one is known
            turn += 1

    def misbehave() -> None:
        while not ends.wait(1.0):
            stack.misbehave()

    with ThreadPoolExecutor(5) as pool:
        clients = [pool.submit(ask, client) for client in range(4)] + [pool.submit(misbehave)]
        try:
            yield
        finally:
            ends.set()
        for client in clients:
            client.result()

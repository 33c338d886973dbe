"""A front in a process of its own, and what tests do to it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.waiting import Waiting

ROOT = Path(__file__).resolve().parents[2]
MODEL = "fake"
PATIENCE_SECONDS = 60.0


def until(true: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until `true()` is."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)


class LiveFront:
    def __init__(self, process: subprocess.Popen[bytes], directory: Path) -> None:
        self.process = process
        self.directory = directory
        self.url = ""

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def logged(self, part: str) -> list[str]:
        """The log's lines with `part`, once there is one: a line is written after its answer is sent."""

        def lines() -> list[str]:
            return [line for line in self.log.splitlines(keepends=True) if part in line and line[-1] == "\n"]

        until(lines, f"{part!r} in the log")
        return lines()

    @property
    def journal(self) -> list[dict[str, Any]]:
        path = self.directory / "journal"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines()]

    def noted(self, what: str) -> list[Any]:
        return [entry[what] for entry in self.journal if what in entry]

    @property
    def engine_pid(self) -> int:
        return int(self.noted("start")[-1]["pid"])

    @property
    def sockets(self) -> list[Path]:
        """What the front keeps in its temporary directory."""
        return list((self.directory / "tmp").iterdir())

    def until_listening(self) -> None:
        def listening() -> bool:
            assert self.process.poll() is None, self.log
            return bool(re.search(r"event=listening url=(\S+)", self.log))

        until(listening, "the front to listen")
        found = re.search(r"event=listening url=(\S+)", self.log)
        assert found
        self.url = found[1]

    def until_ready(self) -> None:
        self.until_listening()

        def ready() -> bool:
            assert self.process.poll() is None, self.log
            return httpx.get(f"{self.url}/ready").status_code == 200

        until(ready, "the front to be ready")

    def until_exit(self, seconds: float = PATIENCE_SECONDS) -> int:
        return self.process.wait(seconds)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.until_exit()

    def waiting(self) -> Waiting:
        """Adds up, while entered, how long both the front and its engine of now sit and wait."""
        return Waiting(self.process.pid, self.engine_pid)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def post(self, path: str, body: Mapping[str, Any], **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=120, **options)

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", chat_body(**fields))

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": MODEL, "prompt": "Hello"} | fields)


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]} | fields


def orders(**said: Any) -> str:
    """The `cache_salt` that tells the fake engine what to do; see its Orders."""
    return json.dumps(said)


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of every event but the closing one, which must be there."""
    events = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in events)
    assert events[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in events[:-1]]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The inside of an OpenAI error body, whose shape is checked."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    found: dict[str, Any] = body["error"]
    return found


@contextmanager
def live_front(
    model: Path, *flags: str, start: Mapping[str, Any] | None = None, wait: bool = True
) -> Iterator[LiveFront]:
    """A front over a fake engine, killed afterwards if it still runs.

    Args:
        model: checkpoint whose text files are used.
        flags: of the front, beside those that are always given.
        start: how the engine starts; see the fake engine's Start.
        wait: until it is ready.
    """
    with tempfile.TemporaryDirectory(prefix="hf") as name:
        directory = Path(name)
        (directory / "tmp").mkdir()
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HOTSET_")} | {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}",
            "TMPDIR": str(directory / "tmp"),
            "FAKE_ENGINE": json.dumps(dict(start or {})),
            "FAKE_ENGINE_JOURNAL": str(directory / "journal"),
        }
        always = (f"--model={model}", f"--served-model-name={MODEL}", "--port=0")
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.front.run_front", *always, *flags],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        front = LiveFront(process, directory)
        try:
            if wait:
                front.until_ready()
            yield front
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

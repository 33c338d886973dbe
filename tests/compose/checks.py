"""What must be true of the stack that runs: answers, metrics, privileges, and lives after a kill -9."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from urllib.parse import quote
from urllib.request import urlopen

import openai
from openai.types.chat import ChatCompletionMessageParam

from tests.compose.say import say, step
from tests.compose.stack import SERVICES, Stack, commands_of, until

API, PROMETHEUS = "http://127.0.0.1:8000", "http://127.0.0.1:9090"
QUESTION = "What is the capital of France?"


def answers() -> str:
    """What the default model says to a question, over the published port: whole, and the same streamed."""
    client = openai.OpenAI(base_url=f"{API}/v1", api_key="none", timeout=180)
    [model] = client.models.list().data
    asked: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
    with step("asking with the OpenAI client"):
        whole = client.chat.completions.create(model=model.id, messages=asked, temperature=0, max_tokens=24)
        text = whole.choices[0].message.content or ""
        stream = client.chat.completions.create(
            model=model.id, messages=asked, temperature=0, max_tokens=24, stream=True
        )
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    say(f"it says: {text}")
    assert "Paris" in text
    assert streamed == text
    return text


def images_are_small(stack: Stack) -> None:
    """kvstore's has no torch; what each adds to its base is told."""
    names = ("torch", "transformers", "fastapi")
    look = f"import importlib.util as u; print([n for n in {names} if u.find_spec(n)])"
    assert stack.inside("kvstore", "python", "-c", look).strip() == "[]"
    sizes = {name: stack.bytes_of(f"hotset-{name}") / 1e6 for name in ("kvstore", "decoder")}
    say(f"over the base image: kvstore {sizes['kvstore']:.0f} MB, decoder {sizes['decoder']:.0f} MB")
    assert sizes["kvstore"] < 200


def prometheus_sees_it() -> None:
    """Its targets are up, and the hot buffer's counters have counted."""
    with step("waiting for Prometheus to see it"):
        until(lambda: {"decoder:8000", "kvstore:7701"} <= _targets_up(), "both targets to be up")
        until(lambda: _value("sum(hotset_hot_buffer_chosen_total)") > 0, "chosen blocks in Prometheus")
    hits, misses, chosen = (f"sum(hotset_hot_buffer_{name}_total)" for name in ("hits", "misses", "chosen"))
    assert _value(f"{hits} + {misses} - {chosen}") == 0, "of one scrape"
    say(f"in Prometheus: {_value(hits):.0f} hits and {_value(misses):.0f} misses of the hot buffer")


def containers_are_confined(stack: Stack) -> None:
    """No root, no capability, no writable root; the arena is one tmpfs that may have huge pages."""
    for service in SERVICES:
        found = stack.inspect(service)
        assert found["Config"]["User"].split(":")[0] not in ("", "0", "root"), service
        assert found["HostConfig"]["ReadonlyRootfs"], service
        assert found["HostConfig"]["CapDrop"] == ["ALL"], service
        assert "CapEff:\t0000000000000000" in stack.inside(service, "cat", "/proc/self/status"), service
    mounts = [stack.inside(service, "grep", " /arena ", "/proc/mounts") for service in ("kvstore", "decoder")]
    assert mounts[0] == mounts[1]
    assert mounts[0].startswith("tmpfs /arena tmpfs")
    assert "huge=advise" in mounts[0]
    say(f"the arena's mount: {mounts[0].strip()}")


def comes_back(stack: Stack, service: str, program: str) -> None:
    """Kill the service's own process, as an operator or the kernel would; its container starts again."""
    before = stack.inspect(service)
    [pid] = _running(before["State"]["Pid"], program)
    with step(f"kill -9 of {service}'s process, until it is healthy again"):
        os.kill(pid, signal.SIGKILL)
        until(
            lambda: stack.inspect(service)["RestartCount"] > before["RestartCount"],
            f"{service} to start again",
        )
        until(lambda: stack.is_healthy(service), f"{service} to be healthy")


def _running(init: int, program: str) -> Sequence[int]:
    return [pid for pid, line in commands_of(init) if program in line]


def _targets_up() -> set[str]:
    targets = json.loads(_get("/api/v1/targets"))["data"]["activeTargets"]
    return {target["labels"]["instance"] for target in targets if target["health"] == "up"}


def _value(query: str) -> float:
    """Of an expression that is one number; 0 where it has no data yet."""
    result = json.loads(_get(f"/api/v1/query?query={quote(query)}"))["data"]["result"]
    return float(result[0]["value"][1]) if result else 0.0


def _get(path: str) -> bytes:
    with urlopen(f"{PROMETHEUS}{path}", timeout=60) as answer:
        body = answer.read()
    assert isinstance(body, bytes)
    return body

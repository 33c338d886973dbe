"""The two commands from a fresh clone, as a stranger would type them: `make run`, then an OpenAI client."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from services.command.serve.arena_directory import TMPFS
from services.command.serve.probe import free_port
from tests.house.launcher import ROOT, Launcher, wait_until_gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def clone() -> Iterator[Path]:
    """Of the last commit; removed afterwards, for it grows to gigabytes."""
    with tempfile.TemporaryDirectory(prefix="hotset-clone-") as directory:
        target = Path(directory) / "hotset"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(target)], check=True)
        yield target


def _run(clone: Path, port: int, **variables: str) -> Launcher:
    environment = {"PYTHONPATH": "", "XDG_CACHE_HOME": str(clone.parent / "cache")}
    kept = {name: "" for name in os.environ if name.startswith(("MAKE", "HOTSET_", "VIRTUAL_ENV"))}
    arguments = [f"{name}={value}" for name, value in variables.items()]
    command = ["make", "run", f"PORT={port}", *arguments]
    return Launcher(clone, kept | environment, command)


def _arena(run: Launcher) -> Path:
    """The arena file of this run."""
    return Path(run.wait_for_line("kvstore ready").split("arena=")[1])


@pytest.mark.parametrize("life", ["first", "second"])
def test_make_run_answers_and_leaves_nothing(clone: Path, life: str) -> None:
    port = free_port()
    start = time.monotonic()
    with _run(clone, port, ARGS="--max-rows 4") as run:
        run.wait_for_line("ready after", 1500 if life == "first" else 150)
        took = time.monotonic() - start
        assert life == "first" or "installing" not in run.output
        assert life == "first" or took < 150
        assert f"curl http://127.0.0.1:{port}/v1/chat/completions" in run.output

        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120)
        [model] = client.models.list().data
        answer = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=40
        )
        assert "Paris" in (answer.choices[0].message.content or "")
        stream = client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=40,
            stream=True,
        )
        parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        assert "".join(parts) == answer.choices[0].message.content
        completion = client.completions.create(
            model=model.id, prompt="The capital of France is", temperature=0, max_tokens=5
        )
        assert "Paris" in completion.choices[0].text

        processes = run.descendants()
        services = [_service(process) for process in processes]
        assert sorted(filter(None, services)) == ["decoder", "decoder.engine", "kvstore"]
        arena = _arena(run)
        assert arena.is_relative_to(TMPFS)
        assert arena.stat().st_blocks > 0, "the KV of the answers was written there"
        run.interrupt()
        run.finish(30)
    wait_until_gone(processes)
    assert "stopped" in run.output
    assert not arena.parent.exists()


def _service(process: psutil.Process) -> str | None:
    """`kvstore` for `python -m services.kvstore ...`."""
    words = process.cmdline()
    following = words[words.index("-m") + 1 :] if "-m" in words else []
    return following[0].removeprefix("services.") if following and "services." in following[0] else None


def test_a_model_that_is_none(clone: Path, tmp_path: Path) -> None:
    with _run(clone, free_port(), MODEL=str(tmp_path)) as run:
        assert run.finish(600) != 0
    assert "decoder ended with status 2" in run.output
    assert f"error: {tmp_path}" in run.output.split("last lines:")[1]
    assert "Traceback" not in run.output

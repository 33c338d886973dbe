"""Engines that die, fail to start or will not end; signals; and nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.front.live import LiveFront, chat_body, chunks_of, error_of, live_front, orders, until


def _gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def _ended_well(front: LiveFront, engine: int) -> None:
    assert _gone(engine)
    assert front.sockets == []


def test_an_engine_that_dies_is_replaced(default_model: Path) -> None:
    with live_front(default_model) as front:
        first = front.engine_pid
        os.kill(first, signal.SIGKILL)
        until(lambda: "event=engine_restart" in front.log, "the death to be noticed")
        refused = front.chat()
        if refused.status_code != 200:  # it may be back already
            assert error_of(refused)["code"] == "engine_not_ready"
            assert int(refused.headers["retry-after"]) > 0
        front.until_ready()
        assert front.engine_pid != first
        assert front.chat(max_tokens=2).status_code == 200
        assert 'hotset_engine_restarts_total{engine="0"} 1.0' in httpx.get(f"{front.url}/metrics").text
        assert front.logged("killed by signal 9")
        last = front.engine_pid
        assert front.stop() == 0
        _ended_well(front, last)


def test_a_stopped_engine_does_not_stop_the_metrics(default_model: Path) -> None:
    with live_front(default_model) as front:
        os.kill(front.engine_pid, signal.SIGSTOP)
        with front.waiting() as waiting:
            text = httpx.get(f"{front.url}/metrics", timeout=60).text
        assert waiting.seconds < 3
        assert "hotset_http_requests_total" in text
        assert httpx.get(f"{front.url}/health").status_code == 200
        # It cannot answer SIGTERM either; it is killed in the end.
        engine = front.engine_pid
        assert front.stop() == 0
        _ended_well(front, engine)


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        ({"fail": "kvstore at 127.0.0.1:7700 does not answer; start it first"}, "kvstore at 127.0.0.1:7700"),
        ({"delay": 0.3, "fail": "late"}, "late"),
        ({"exit": 2}, "the pretended model is broken"),
        ({"exit": 0}, "exit status 0"),
    ],
)
def test_a_first_start_that_fails_ends_the_front(
    default_model: Path, start: dict[str, object], reason: str
) -> None:
    with live_front(default_model, start=start, wait=False) as front:
        assert front.until_exit() == 2
        error = front.log[front.log.rindex("error: ") :]
        assert reason in error
        assert "Traceback" not in front.log
        assert front.sockets == []


def test_a_model_without_text_files_ends_the_front(tmp_path: Path) -> None:
    with live_front(tmp_path, wait=False) as front:
        assert front.until_exit() == 2
        assert "has no tokenizer.json" in front.log


def test_a_taken_port_ends_the_front(default_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with live_front(default_model, f"--port={port}", wait=False) as front:
            assert front.until_exit() == 2
            assert f"port {port}" in front.log
            assert "--port" in front.log
            assert front.noted("start") == [], "an engine was started for nothing"


def test_a_failed_restart_is_tried_again(default_model: Path) -> None:
    with live_front(default_model, start={"second_fails": True}) as front:
        os.kill(front.engine_pid, signal.SIGKILL)
        until(lambda: "exit status 3" in httpx.get(f"{front.url}/health").text, "the second life to fail")
        until(lambda: len(front.noted("start")) == 3, "a third life")
        front.until_ready()
        assert 'hotset_engine_restarts_total{engine="0"} 2.0' in httpx.get(f"{front.url}/metrics").text
        assert front.chat(max_tokens=2).status_code == 200
        assert front.stop() == 0


def test_the_socket_is_private(default_model: Path) -> None:
    with live_front(default_model) as front:
        (directory,) = front.sockets
        assert directory.stat().st_mode & 0o777 == 0o700
        assert front.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_requests_finish_at_the_end(default_model: Path, number: signal.Signals) -> None:
    with live_front(default_model) as front, ThreadPoolExecutor() as pool:
        salt = orders(say="one two three four five", pause=0.2)
        whole = pool.submit(front.chat, cache_salt=salt)
        streamed = pool.submit(front.chat, cache_salt=salt, stream=True)
        until(lambda: len(front.noted("submit")) == 2, "both to run")
        engine = front.engine_pid
        front.process.send_signal(number)
        assert whole.result().json()["choices"][0]["message"]["content"] == "one two three four five"
        assert chunks_of(streamed.result())
        assert front.until_exit() == 0
        _ended_well(front, engine)
        assert front.noted("end") == [engine], "the engine was not asked to end"


def test_the_end_comes_within_ten_seconds_whatever_runs(default_model: Path) -> None:
    """A request without end, clients that stall in their request or their answer, an engine that is deaf."""
    with live_front(default_model, start={"deaf": True}) as front, ThreadPoolExecutor() as pool:
        held = pool.submit(front.chat, cache_salt=orders(hold=True))
        until(lambda: front.noted("submit"), "it to run")
        engine = front.engine_pid
        with (
            socket.create_connection(("127.0.0.1", int(front.url.rsplit(":", 1)[1]))) as idle,
            httpx.stream(
                "POST", f"{front.url}/v1/chat/completions", json=chat_body(stream=True, n=7)
            ) as unread,
        ):
            assert unread.status_code == 200  # megabytes follow, more than sockets hold
            idle.sendall(b"GET /heal")
            with front.waiting() as waiting:
                assert front.stop() == 0
            assert waiting.seconds < 10
        assert error_of(held.result())["code"] == "shutting_down"
        _ended_well(front, engine)


def test_the_end_during_the_start(default_model: Path) -> None:
    with live_front(default_model, start={"delay": 3600}, wait=False) as front:
        front.until_listening()
        until(lambda: front.noted("start"), "the engine")
        engine = front.engine_pid
        with front.waiting() as waiting:
            assert front.stop() == 0
        assert waiting.seconds < 5
        _ended_well(front, engine)


def test_a_start_tells_how_far_it_is(default_model: Path) -> None:
    with live_front(default_model, start={"delay": 3600}, wait=False) as front:
        front.until_listening()
        until(lambda: "pretended weights" in httpx.get(f"{front.url}/health").text, "the engine to speak")
        health = httpx.get(f"{front.url}/health")
        assert (health.status_code, health.json()["status"]) == (200, "starting")
        metrics = httpx.get(f"{front.url}/metrics").text
        assert 'hotset_arena_bytes{engine="0",state="registered"} 1024.0' in metrics
        assert 'hotset_arena_bytes{engine="0",state="unregistered"} 3072.0' in metrics
        os.kill(front.engine_pid, signal.SIGKILL)
        assert front.until_exit() == 2  # the first start failed


def test_a_second_interrupt_ends_at_once(default_model: Path) -> None:
    with live_front(default_model, "--shutdown-seconds=60") as front, ThreadPoolExecutor() as pool:
        pool.submit(_ignored_chat, front)
        until(lambda: front.noted("submit"), "it to run")
        engine = front.engine_pid
        front.process.send_signal(signal.SIGINT)
        until(lambda: "event=draining" in front.log, "the end to begin")
        with front.waiting() as waiting:
            front.process.send_signal(signal.SIGINT)
            assert front.until_exit() == 128 + signal.SIGINT
        assert waiting.seconds < 2
        until(lambda: _gone(engine), "the engine to be gone")
        assert front.sockets == []


def _ignored_chat(front: LiveFront) -> None:
    with pytest.raises(httpx.HTTPError):
        front.chat(cache_salt=orders(hold=True))


def test_an_engine_dies_with_its_front(default_model: Path) -> None:
    with live_front(default_model, start={"deaf": True}) as front:
        engine = front.engine_pid
        front.process.kill()
        until(lambda: _gone(engine), "the engine to be gone")


def test_the_engines_lines_are_in_the_log(front: LiveFront) -> None:
    assert front.logged("event=fake_engine_ready\n")

"""`make run` after the installation, with tiny services: start, progress, flags, failures, and clean ends."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.command.serve.arena_directory import PREFIX, TMPFS, ArenaDirectory
from services.command.serve.probe import free_port, is_ready
from tests.house.fake_services import write_fakes
from tests.house.launcher import Launcher, wait_until_gone


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_fakes(tmp_path)
    return tmp_path


@pytest.fixture
def port() -> str:
    return str(free_port())


def _arena(launcher: Launcher) -> Path:
    line = launcher.wait_for_line("kvstore ready")
    return Path(line.split("arena=")[1]).parent


def _get(port: str, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=5)
    with contextlib.suppress(http.client.HTTPException, OSError), contextlib.closing(connection):
        connection.request("GET", path)
        connection.getresponse().read()


def test_from_start_to_ctrl_c(place: Path, port: str) -> None:
    flags = ["--max-rows", "4", "--served-model-name", "a b", "--store-args=--arena-bytes 64MiB"]
    with Launcher(place, {}, flags=["--port", port, *flags]) as launcher:
        launcher.wait_for_line(f"http://127.0.0.1:{port}")
        curl = launcher.wait_for_line("curl")
        arena = _arena(launcher)
        children = launcher.descendants()
        assert len(children) == 2
        assert (arena / "arena").read_bytes() == b"kv"
        launcher.interrupt()
        assert launcher.finish() == 0, launcher.output
    assert f"curl http://127.0.0.1:{port}/v1/chat/completions" in curl
    assert '"model": "a b"' in curl
    got = launcher.wait_for_line("decoder got")
    assert "--model /a/model" in got
    assert "--kvstore 127.0.0.1:7" in got
    assert "--max-rows 4 --served-model-name a b" in got
    assert "--store-args" not in got
    assert launcher.wait_for_line("kvstore got").endswith("--arena-bytes 64MiB")
    assert launcher.lines.index("decoder | decoder ends") < launcher.lines.index("kvstore | kvstore ends")
    assert launcher.lines[-1] == "hotset  | stopped"
    assert not arena.exists()
    wait_until_gone(children)


def test_with_a_store_named_it_becomes_the_decoder(place: Path, port: str) -> None:
    with Launcher(place, {}, flags=["--port", port, "--kvstore", "127.0.0.1:9"]) as launcher:
        got = launcher.wait_for_line("decoder got")
        assert launcher.descendants() == []
        launcher.process.terminate()
        launcher.finish()
    assert got == "decoder got --model /a/model --kvstore 127.0.0.1:9"
    assert "kvstore got" not in launcher.output


def test_the_environment_may_name_the_store(place: Path, port: str) -> None:
    with Launcher(place, {"HOTSET_KVSTORE": "127.0.0.1:9"}, flags=["--port", port]) as launcher:
        assert launcher.wait_for_line("decoder got") == "decoder got --model /a/model"
        launcher.process.terminate()
        launcher.finish()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_stop_it_too(place: Path, port: str, number: signal.Signals) -> None:
    with Launcher(place, {}, flags=["--port", port, "--model", str(place)]) as launcher:
        launcher.wait_for_line("curl")
        assert f"--model {place} " in launcher.wait_for_line("decoder got")
        arena, children = _arena(launcher), launcher.descendants()
        launcher.process.send_signal(number)
        assert launcher.finish() == 0, launcher.output
    assert not arena.exists()
    wait_until_gone(children)


FAILURES = {
    "kvstore": ({"FAKE_KVSTORE": "failure"}, "kvstore ended with status 1", "no tmpfs here"),
    "decoder": ({"FAKE_DECODER": "failure"}, "decoder ended with status 1", "unsupported architecture"),
}


@pytest.mark.parametrize(("variables", "reason", "detail"), FAILURES.values(), ids=FAILURES)
def test_a_service_that_dies_at_start(
    place: Path, port: str, variables: dict[str, str], reason: str, detail: str
) -> None:
    before = set(TMPFS.glob(f"{PREFIX}*"))
    with Launcher(place, variables, flags=["--port", port]) as launcher:
        assert launcher.finish() == 1
    error = launcher.output[launcher.output.index("error: ") :]
    assert reason in error
    assert detail in error.split("last lines:")[1]
    assert set(TMPFS.glob(f"{PREFIX}*")) <= before


def test_a_service_that_dies_later(place: Path, port: str) -> None:
    with Launcher(place, {}, flags=["--port", port]) as launcher:
        launcher.wait_for_line("curl")
        arena = _arena(launcher)
        _get(port, "/die")
        assert launcher.finish() == 1
    assert "error: decoder ended with status 3" in launcher.output
    assert "kvstore | kvstore ends" in launcher.lines
    assert not arena.exists()


def test_a_killed_service_is_named_with_its_signal(place: Path, port: str) -> None:
    with Launcher(place, {}, flags=["--port", port]) as launcher:
        launcher.wait_for_line("curl")
        [kvstore] = [child for child in launcher.descendants() if "services.kvstore" in child.cmdline()]
        kvstore.kill()
        assert launcher.finish() == 1
    assert "error: kvstore was killed by SIGKILL" in launcher.output


def test_a_busy_port(place: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with Launcher(place, {}, flags=["--port", str(port)]) as launcher:
            assert launcher.finish() == 1
    assert f"port {port} of 127.0.0.1 is busy" in launcher.output
    assert f"make run PORT={port + 1}" in launcher.output
    assert "kvstore" not in launcher.output


REFUSED = {
    "not a number": (["--port", "http"], "port: Input should be a valid integer"),
    "too large": (["--port", "65536"], "port: Input should be less than"),
    "zero": (["--port", "0"], "--port 0 is no port"),
    "no such flag": (["--prot", "8001"], "--prot"),
    "no such model": (["--model", "/no/such/checkpoint"], "--model /no/such/checkpoint is no directory"),
    "open quote": (["--store-args=--listen 'a"], "cannot be split"),
    "two stores": (["--kvstore=h:1", "--store-args=--arena-bytes 1GiB"], "leave one of them out"),
}


@pytest.mark.parametrize(("flags", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused_before_anything_starts(place: Path, flags: list[str], reason: str) -> None:
    with Launcher(place, {}, flags=flags) as launcher:
        assert launcher.finish() == 2
    assert reason in launcher.output
    assert "Traceback" not in launcher.output


def test_a_second_ctrl_c_ends_a_stubborn_service(place: Path, port: str) -> None:
    with Launcher(place, {"FAKE_DECODER": "stubborn"}, flags=["--port", port]) as launcher:
        launcher.wait_for_line("curl")
        arena, children = _arena(launcher), launcher.descendants()
        launcher.interrupt()
        with pytest.raises(psutil.TimeoutExpired):
            psutil.Process(launcher.process.pid).wait(1)
        launcher.interrupt()
        assert launcher.finish(5) == 0
    assert "did not stop; killing it" in launcher.output
    assert not arena.exists()
    wait_until_gone(children)


def test_what_a_service_leaves_behind_is_ended(place: Path, port: str) -> None:
    with Launcher(place, {"FAKE_DECODER": "children"}, flags=["--port", port]) as launcher:
        launcher.wait_for_line("curl")
        grandchild = psutil.Process(int(launcher.wait_for_line("grandchild").split()[-1]))
        launcher.interrupt()
        assert launcher.finish() == 0
    wait_until_gone([grandchild])


def test_a_killed_launcher_takes_its_services_along(place: Path, port: str) -> None:
    with Launcher(place, {}, flags=["--port", port]) as launcher:
        launcher.wait_for_line("curl")
        arena, children = _arena(launcher), launcher.descendants()
        launcher.process.kill()
        launcher.process.wait()
        wait_until_gone(children)
    assert arena.exists()  # nobody was left to remove it ...
    with ArenaDirectory() as next_run:
        assert not arena.exists()  # ... but the next run does
        assert next_run.path.is_dir()
    assert not next_run.path.exists()


def test_nobody_reads_the_output_any_more(place: Path, port: str) -> None:
    reader, writer = os.pipe()
    with Launcher(place, {}, flags=["--port", port], output=writer) as launcher:
        os.close(writer)
        assert b"hotset" in os.read(reader, 4096)
        os.close(reader)
        deadline = time.monotonic() + 30
        while not is_ready("127.0.0.1", int(port)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        launcher.interrupt()
        assert launcher.finish() == 0


@pytest.fixture
def parent() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=TMPFS) as directory:
        yield Path(directory)


def test_a_living_run_keeps_its_directory(parent: Path) -> None:
    with ArenaDirectory(parent) as first, ArenaDirectory(parent) as second:
        assert first.path != second.path
        assert first.path.is_dir()
        assert first.path.stat().st_mode & 0o777 == 0o700


def test_what_others_put_there_is_left_alone(parent: Path) -> None:
    (parent / f"{PREFIX}not-ours").mkdir()
    (parent / "hotset").mkdir()
    with ArenaDirectory(parent):
        pass
    assert {path.name for path in parent.iterdir()} == {f"{PREFIX}not-ours", "hotset"}


def test_a_run_that_ends_while_another_sweeps(parent: Path) -> None:
    """What the sweep has listed may be gone when it looks."""
    (parent / f"{PREFIX}gone").symlink_to(parent / "nowhere")
    with ArenaDirectory(parent) as made:
        assert made.path.is_dir()
        assert [path.name for path in made.path.iterdir()] == ["run.lock"]

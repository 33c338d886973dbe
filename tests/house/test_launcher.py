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

from deploy.local.arena_directory import PREFIX, TMPFS, ArenaDirectory
from deploy.local.probe import free_port, is_ready
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
    variables = {"PORT": port, "ARGS": "--max-rows 4 --name 'a b'", "KVSTORE_ARGS": "--arena-bytes 64MiB"}
    with Launcher(place, variables) as launcher:
        launcher.wait_for_line(f"http://127.0.0.1:{port}")
        curl = launcher.wait_for_line("curl")
        arena = _arena(launcher)
        children = launcher.descendants()
        assert len(children) == 2
        assert (arena / "arena").read_bytes() == b"kv"
        launcher.interrupt()
        assert launcher.finish() == 0, launcher.output
    assert f"curl http://127.0.0.1:{port}/v1/chat/completions" in curl
    assert '"model": "served-name"' in curl
    got = launcher.wait_for_line("decoder got")
    assert "--model /a/model" in got
    assert "--kvstore 127.0.0.1:7" in got
    assert got.endswith("--max-rows 4 --name a b")
    assert launcher.wait_for_line("kvstore got").endswith("--arena-bytes 64MiB")
    assert launcher.lines.index("decoder | decoder ends") < launcher.lines.index("kvstore | kvstore ends")
    assert launcher.lines[-1] == "hotset  | stopped"
    assert not arena.exists()
    wait_until_gone(children)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_stop_it_too(place: Path, port: str, number: signal.Signals) -> None:
    with Launcher(place, {"PORT": port, "MODEL": str(place)}) as launcher:
        launcher.wait_for_line("curl")
        assert f"--model {place} " in launcher.wait_for_line("decoder got")
        arena, children = _arena(launcher), launcher.descendants()
        launcher.process.send_signal(number)
        assert launcher.finish() == 0, launcher.output
    assert not arena.exists()
    wait_until_gone(children)


FAILURES = {
    "kvstore": ({"KVSTORE_ARGS": "--fake-failure"}, "kvstore ended with status 1", "no tmpfs here"),
    "decoder": ({"ARGS": "--fake failure"}, "decoder ended with status 1", "unsupported architecture"),
}


@pytest.mark.parametrize(("variables", "reason", "detail"), FAILURES.values(), ids=FAILURES)
def test_a_service_that_dies_at_start(
    place: Path, port: str, variables: dict[str, str], reason: str, detail: str
) -> None:
    before = set(TMPFS.glob(f"{PREFIX}*"))
    with Launcher(place, {"PORT": port} | variables) as launcher:
        assert launcher.finish() == 1
    error = launcher.output[launcher.output.index("error: ") :]
    assert reason in error
    assert detail in error.split("last lines:")[1]
    assert set(TMPFS.glob(f"{PREFIX}*")) <= before


def test_a_service_that_dies_later(place: Path, port: str) -> None:
    with Launcher(place, {"PORT": port}) as launcher:
        launcher.wait_for_line("curl")
        arena = _arena(launcher)
        _get(port, "/die")
        assert launcher.finish() == 1
    assert "error: decoder ended with status 3" in launcher.output
    assert "kvstore | kvstore ends" in launcher.lines
    assert not arena.exists()


def test_a_killed_service_is_named_with_its_signal(place: Path, port: str) -> None:
    with Launcher(place, {"PORT": port}) as launcher:
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
        with Launcher(place, {"PORT": str(port)}) as launcher:
            assert launcher.finish() == 1
    assert f"port {port} of 127.0.0.1 is busy" in launcher.output
    assert f"make run PORT={port + 1}" in launcher.output
    assert "kvstore" not in launcher.output


REFUSED = {
    "not a number": ({"PORT": "http"}, "PORT=http is no port"),
    "too large": ({"PORT": "65536"}, "PORT=65536 is no port"),
    "zero": ({"PORT": "0"}, "PORT=0 is no port"),
    "set twice": ({"ARGS": "--port 8001"}, "set PORT= instead"),
    "set twice, joined": ({"ARGS": "--model=/m"}, "set MODEL= instead"),
    "no such model": ({"MODEL": "/no/such/checkpoint"}, "MODEL=/no/such/checkpoint is no directory"),
    "open quote": ({"ARGS": "--name 'a"}, "cannot be split"),
}


@pytest.mark.parametrize(("variables", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused_before_anything_starts(place: Path, variables: dict[str, str], reason: str) -> None:
    with Launcher(place, variables) as launcher:
        assert launcher.finish() == 1
    assert reason in launcher.output
    assert "Traceback" not in launcher.output


def test_a_second_ctrl_c_ends_a_stubborn_service(place: Path, port: str) -> None:
    with Launcher(place, {"PORT": port, "ARGS": "--fake stubborn"}) as launcher:
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
    with Launcher(place, {"PORT": port, "ARGS": "--fake children"}) as launcher:
        launcher.wait_for_line("curl")
        grandchild = psutil.Process(int(launcher.wait_for_line("grandchild").split()[-1]))
        launcher.interrupt()
        assert launcher.finish() == 0
    wait_until_gone([grandchild])


def test_a_killed_launcher_takes_its_services_along(place: Path, port: str) -> None:
    with Launcher(place, {"PORT": port}) as launcher:
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
    with Launcher(place, {"PORT": port}, output=writer) as launcher:
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

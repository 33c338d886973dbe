"""Real kvstore processes: start, kill, restart, stop, and what is left behind."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hotset.v1 import kvstore_pb2 as pb

from services.contract.errors import NotFound, StateConflict, Unavailable
from services.contract.layout import LAYOUT_VERSION
from services.kvstore.seals import Seal
from tests.kvstore.process import Client, KvStore, error_of, eventually
from tests.kvstore.world import ARENA_BYTES, PAGE_COUNT

TOKENS = [f"{number:032x}" for number in range(1, 5)]
Start = Callable[..., KvStore]


@pytest.fixture
def start(shm: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts kvstores on one arena directory; all are gone afterwards."""
    with ExitStack() as stack:

        def begin(*flags: str, directory: Path = shm / "arena", **environment: str) -> KvStore:
            return stack.enter_context(KvStore(directory, *flags, logs=tmp_path, environment=environment))

        yield begin


def test_a_life_in_good_order(start: Start, shm: Path) -> None:
    store = start().ready()
    assert store.arena == shm / "arena" / "arena.bin"
    assert "laid out by the first client's planes" in store.output
    with Client(store, "engine-0", TOKENS[0], mapped=True) as client:
        attached = client.attach()
        assert attached.arena_path == str(store.arena)
        assert (attached.arena_bytes, attached.layout_version) == (ARENA_BYTES, LAYOUT_VERSION)
        assert (attached.page_count, attached.lease_ms) == (PAGE_COUNT, 10_000)
        page = client.update(1).pages[0]
        client.update(seals=[Seal(page, bytes(16), None)])
        stats = store.stats()
        assert (stats.sealed_pages, stats.free_pages, stats.sessions) == (1, PAGE_COUNT - 1, 1)
        assert not store.stats().draining
        assert client.match([bytes(16)]) == [page]
        assert client.detach().released_pages == 2
        assert store.stats().cached_pages == 1
        assert store.terminate() < 2, "nobody is there to be waited for"
    assert list(shm.iterdir()) == []
    events = [line.split("event=")[1].split()[0] for line in store.log.splitlines()]
    assert events == ["layout", "attach", "session_end", "drain", "stopped"]


def test_two_stores_on_one_arena(start: Start) -> None:
    first = start().ready()
    message = start().refused()
    assert f"another kvstore holds {first.arena}; stop it, or give this one its own --arena-dir" in message
    assert first.stats().arena_bytes == ARENA_BYTES


def test_killed_and_started_again(start: Start, shm: Path) -> None:
    first = start().ready()
    with Client(first, "engine-0", TOKENS[0], mapped=True) as client:
        before = client.attach()
        kept, sealed = client.update(2).pages
        client.update(seals=[Seal(sealed, bytes(16), None)])
        with first.arena.open("r+b") as file:
            file.seek(ARENA_BYTES - 4096)
            file.write(b"records of a running request")
        first.process.kill()
        first.process.wait()
        assert type(error_of(client.heartbeat)) is Unavailable

        second = start("--lease-seconds=1.5").ready()
        assert "2 held from before" in second.output
        client.store = second
        assert type(error_of(client.heartbeat)) is NotFound
        after = client.attach(held=[kept, sealed])
        assert after.session_id == before.session_id
        assert after.epoch > before.epoch
        assert after.sealed_held == b"\x02", "the second"
        with second.arena.open("rb") as file:
            file.seek(ARENA_BYTES - 4096)
            assert file.read(28) == b"records of a running request"
        client.update(1, releases=[kept, sealed])
        # The sealed page stays for another client to claim until the grace period, one lease, is over.
        eventually(lambda: second.stats().cached_pages == 1)
        assert client.detach().released_pages == 1
        second.terminate()
    assert list(shm.iterdir()) == []


def test_a_mapped_client_that_is_stopped_keeps_its_pages_and_one_that_is_killed_does_not(
    start: Start,
) -> None:
    store = start("--lease-seconds=0.3").ready()
    with Client(store, "engine-0", TOKENS[0], mapped=True) as client:
        client.attach()
        client.update(3)
        assert client.process is not None
        client.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, client.process.pid, os.WSTOPPED)
        eventually(lambda: store.metric("hotset_store_sessions_expired") == 1)
        with Client(store, "engine-0", TOKENS[1], mapped=True) as newcomer:
            assert type(error_of(newcomer.attach)) is StateConflict
        assert store.stats().open_pages == 3
        client.process.send_signal(signal.SIGKILL)
        eventually(lambda: store.stats().open_pages == 0, 8)
        eventually(lambda: not client.lock_path.exists(), 8)
    assert store.stats().sessions == 0


def test_a_killed_clients_successor_is_let_in_at_once(start: Start) -> None:
    store = start().ready()
    with Client(store, "engine-0", TOKENS[0], mapped=True) as old:
        old.attach()
        old.update(PAGE_COUNT)
    with Client(store, "engine-0", TOKENS[1], mapped=True) as new:
        new.attach()
        assert len(new.update(PAGE_COUNT).pages) == PAGE_COUNT


def test_a_remote_clients_lease(start: Start) -> None:
    store = start("--lease-seconds=0.5").ready()
    client = Client(store, "peer", TOKENS[0], mapped=False)
    client.attach()
    client.update(3)
    for _ in range(20):  # longer than the lease, all together
        client.heartbeat()
        assert store.stats().open_pages == 3
        signal.sigtimedwait([], 0.05)
    eventually(lambda: store.stats().open_pages == 0, 8)
    assert type(error_of(client.heartbeat)) is NotFound


def test_sigterm_drains_while_clients_leave(start: Start, shm: Path) -> None:
    store = start("--drain-seconds=7").ready()
    health = health_pb2_grpc.HealthStub(store.channel)
    request = health_pb2.HealthCheckRequest(service="hotset.v1.KvStore")
    assert health.Check(request).status == health_pb2.HealthCheckResponse.SERVING
    with Client(store, "engine-0", TOKENS[0], mapped=True) as client:
        client.attach()
        page = client.update(1).pages[0]
        store.signal(signal.SIGTERM)
        eventually(lambda: store.stats().draining)
        assert health.Check(request).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert type(error_of(lambda: client.update(1))) is StateConflict
        with Client(store, "engine-1", TOKENS[1], mapped=True) as other:
            assert type(error_of(other.attach)) is StateConflict
        client.update(releases=[page])
        client.detach()
        assert store.process.wait(30) == 0
    assert list(shm.iterdir()) == []


def test_sigterm_does_not_wait_for_ever_and_leaves_nothing(start: Start, shm: Path) -> None:
    store = start("--drain-seconds=0.5").ready()
    with (
        Client(store, "engine-0", TOKENS[0], mapped=True) as client,
        Client(store, "engine-1", TOKENS[1], mapped=False) as other,
    ):
        client.attach()
        other.attach()
        client.update(2)
        began = time.monotonic()
        assert store.terminate() < 2.5
        assert time.monotonic() - began >= 0.5
        assert list(shm.iterdir()) == []


def test_a_second_signal_hurries(start: Start) -> None:
    store = start("--drain-seconds=7").ready()
    Client(store, "peer", TOKENS[0], mapped=False).attach()
    store.signal(signal.SIGINT)
    eventually(lambda: "event=drain" in store.log)
    assert store.terminate() < 2


def test_a_client_killed_while_draining_ends_the_wait(start: Start) -> None:
    store = start("--drain-seconds=7").ready()
    with Client(store, "engine-0", TOKENS[0], mapped=True) as client:
        client.attach()
        store.signal(signal.SIGTERM)
        eventually(lambda: store.stats().draining)
    assert store.process.wait(30) == 0


def test_keep_arena(start: Start, shm: Path) -> None:
    first = start("--keep-arena", "--drain-seconds=0").ready()
    with Client(first, "engine-0", TOKENS[0], mapped=True) as client:
        client.attach()
        page = client.update(1).pages[0]
        first.terminate()
        second = start().ready()
        client.store = second
        client.attach(held=[page])
        client.detach()
        second.terminate()
    assert list(shm.iterdir()) == []


def test_an_arena_that_is_removed_ends_the_service_with_a_reason(start: Start) -> None:
    store = start().ready()
    store.arena.unlink()
    assert store.process.wait(10) == 2
    assert f"error: {store.arena} was removed while kvstore ran; start it again" in store.log
    assert "Traceback" not in store.log


def test_a_fault_while_running_keeps_what_a_kill_would_keep(start: Start) -> None:
    store = start().ready()
    with Client(store, "engine-0", TOKENS[0], mapped=True) as client:
        client.attach()
        client.update(1)
        client.lock_path.unlink()
        client.lock_path.mkdir()  # nobody can say any more whether the client lives
        assert store.process.wait(10) == 2
        assert f"error: {client.lock_path}: Is a directory; remove it" in store.log
        assert "remove it" in start().refused()
        client.lock_path.rmdir()
        assert "1 held from before" in start().ready().output


def test_drain_by_call(start: Start) -> None:
    store = start().ready()
    with Client(store, "engine-0", TOKENS[0], mapped=True) as client:
        client.attach()
        assert store.stub.Drain(pb.DrainRequest()).sessions == 1
        assert store.stats().draining
        eventually(lambda: store.metric("hotset_store_draining") == 1)
        assert store.stats().draining


def test_starts_that_fail_say_why_and_leave_nothing(start: Start, shm: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "cannot listen on 127.0.0.1:" in start(f"--listen=127.0.0.1:{port}").refused()
        assert "choose another --metrics-port" in start(f"--metrics-port={port}").refused()
    assert "smaller --arena-bytes" in start("--arena-bytes=500TiB").refused()
    assert "arena_bytes: Value error, 'much'" in start("--arena-bytes=much").refused()
    assert "cannot serve metrics" in start("--metrics-host=no.such.host.invalid").refused()
    assert "lease_seconds: " in start(HOTSET_LEASE_SECONDS="x").refused()
    assert list(shm.iterdir()) == []


def test_a_failed_start_leaves_the_arena_that_it_found(start: Start) -> None:
    first = start("--keep-arena").ready()
    first.terminate()
    assert "--arena-bytes 4194304" in start("--arena-bytes=8MiB").refused()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        start(f"--listen=127.0.0.1:{taken.getsockname()[1]}").refused()
    assert first.arena.stat().st_size == ARENA_BYTES


def test_a_taken_grpc_port_is_not_shared_with_another_store(start: Start, shm: Path) -> None:
    first = start().ready()
    message = start(f"--listen={first.grpc}", directory=shm / "other").refused()
    assert f"cannot listen on {first.grpc}; is it in use?" in message


def test_a_unix_socket(start: Start, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/kv.sock"
    store = start(f"--listen={address}").ready()
    assert store.grpc == address
    assert store.stats().arena_path == str(store.arena)
    store.terminate()
    assert not (tmp_path / "kv.sock").exists()


def test_settings_from_environment_and_file(start: Start, tmp_path: Path, shm: Path) -> None:
    config = tmp_path / "hotset.toml"
    config.write_text('[kvstore]\nlease_seconds = 3.5\n[decoder]\nmodel = "x"\n')
    store = start(HOTSET_CONFIG=str(config), HOTSET_LOG_LEVEL="error").ready()
    client = Client(store, "peer", TOKENS[0], mapped=False)
    assert client.attach().lease_ms == 3500
    assert store.log == ""


def test_an_unknown_method(start: Start) -> None:
    store = start().ready()
    call = store.channel.unary_unary("/hotset.v1.KvStore/Steal", bytes, bytes)
    with pytest.raises(grpc.RpcError) as caught:
        call(b"")
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

"""What only nixl has: a package that may be missing, places, lanes, edges, a process that ends."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from services.contract.errors import InvalidRequest, SetupError
from services.contract.transport.checksum import load_checksum
from services.contract.transport.counters import TransportCounters
from services.contract.transport.nixl_address import FarPlace, open_place, seal_place
from services.contract.transport.nixl_library import load_nixl
from services.contract.transport.nixl_responder import NixlResponder
from services.contract.transport.ucx_lanes import allowed_lanes, may_use
from tests.contract.transport.child import ROOT
from tests.contract.transport.peer import NIXL, Peer
from tests.contract.transport.slices import expected, memory, question
from tests.nixl import NEEDS_NIXL

CHECKSUM = load_checksum()
PLACE = FarPlace(2**47 + 8, 2**40, b"an agent's metadata")
OPTIONS = NIXL["nixl-tcp"]


def test_a_missing_package_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ucxx", raising=False)
    monkeypatch.setitem(sys.modules, "nixl_cu13", None)
    with pytest.raises(SetupError, match="pip install --no-deps 'nixl-cu13"):
        load_nixl()


def test_one_process_has_one_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx", logging)
    with pytest.raises(SetupError, match="a process can have one"):
        load_nixl()


def test_a_place_is_read_as_written_and_by_its_own_version() -> None:
    sealed = seal_place(PLACE, "1.5.1", CHECKSUM)
    assert open_place(sealed, "1.5.9", CHECKSUM) == PLACE
    with pytest.raises(ValueError, match=r"the peer runs nixl 1\.5\.1 and we 1\.6\.0"):
        open_place(sealed, "1.6.0", CHECKSUM)


def test_a_damaged_place_is_none() -> None:
    sealed = seal_place(PLACE, "1.5.1", CHECKSUM)
    for at in range(len(sealed)):
        for wrong in (sealed[:at], sealed[:at] + bytes([sealed[at] ^ 4]) + sealed[at + 1 :]):
            with pytest.raises(ValueError, match="no address"):
                open_place(wrong, "1.5.1", CHECKSUM)


@pytest.mark.parametrize(
    ("tls", "wanted", "allowed"),
    [
        ("tcp,sm,self", "any", "tcp,sm,self"),
        ("tcp,sm,self", "tcp", "tcp,self"),
        ("tcp,posix,cma,self", "shm", "posix,cma,self"),
        ("rc,ib,tcp", "rdma", "rc,ib"),
    ],
)
def test_lanes_that_are_wanted_are_all_that_is_allowed(tls: str, wanted: str, allowed: str) -> None:
    assert allowed_lanes(tls, wanted) == allowed
    assert may_use(tls, wanted) == tuple(f"may/{name}" for name in allowed.split(",") if name != "self")


@pytest.mark.parametrize("tls", ["tcp,sm,self", "self", "all", "^rc"])
def test_lanes_that_cannot_be_had_are_an_error(tls: str) -> None:
    with pytest.raises(SetupError, match="--ucx-lanes rdma leaves none"):
        allowed_lanes(tls, "rdma")


def test_no_process_no_responder(tmp_path: Path) -> None:
    """Whatever ends it as it starts: a file that is not there, a package that is missing."""
    with pytest.raises(SetupError, match=r"nothing|nixl"):
        NixlResponder(OPTIONS, tmp_path / "nothing", TransportCounters())


def at_the_edges(address: str) -> None:
    """Run in a process of its own: what nixl would believe is refused before it hears of it."""
    import numpy as np

    from services.contract.transport.nixl_memory import NixlMemory, Spans

    far = NixlMemory(bytes.fromhex(address), OPTIONS)
    into = far.take(1 << 16)
    length, soon = far.length, time.monotonic() + 20

    def read(offsets: list[int], lengths: list[int], out: memoryview) -> None:
        far.read(Spans(np.array(offsets, np.int64), np.array(lengths, np.int64)), out, soon)

    read([length - 5, 0], [5, 7], into[1:13])
    assert bytes(into[1:13]) == expected([(length - 5, 5), (0, 7)], memory())
    for offsets, lengths, out in (
        ([length - 4], [5], into[:5]),
        ([-1], [5], into[:5]),
        ([2**62], [2**62], into[:5]),
        ([0], [0], into[:0]),
        ([0, 9], [5, -5], into[:0]),
        ([], [], into[:0]),
        ([0], [5, 5], into[:10]),
        ([0], [5], into[:6]),
        ([0], [5], into[:10:2]),
        ([0], [5], into[:5].toreadonly()),
        ([0], [5], memoryview(bytearray(5))),
    ):
        with pytest.raises(InvalidRequest):
            read(offsets, lengths, out)
    read([3], [len(into)], into)  # a whole buffer
    far.close()
    far.close()
    print("ok")


@NEEDS_NIXL
def test_edges_are_compared_before_nixl_hears_of_them() -> None:
    with Peer("nixl-tcp") as peer:
        here = "from tests.contract.transport.test_nixl import at_the_edges"
        code = f"{here}; at_the_edges('{peer.address.hex()}')"
        done = subprocess.run(
            (sys.executable, "-c", code), cwd=ROOT, capture_output=True, text=True, timeout=120
        )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@NEEDS_NIXL
def test_a_process_that_ends_is_followed_by_another() -> None:
    """And counted; the address of the first leads nowhere, that of the next to the same bytes."""
    with Peer("nixl-tcp") as peer:
        first = peer.requester()
        first.wait(first.submit(question([(0, 9)]), 9, 20.0)).release()
        child, parent = peer.processes()
        child.kill()
        psutil.wait_procs([child], 60)
        deadline = time.monotonic() + 60
        while (told := peer.tell("counters"))["address"] in ("", peer.address.hex()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert told["lost"] == 1
        again = peer.requester()
        with again.wait(again.submit(question([(5, 99)]), 99, 20.0)) as payload:
            assert payload == expected([(5, 99)], memory())
        again.close()
        first.close()
        assert parent.is_running()
        assert peer.tell("end")["address"] == ""
        assert parent.children() == []


@NEEDS_NIXL
@pytest.mark.slow
@pytest.mark.parametrize("transport", NIXL)
def test_many_reads_leave_nothing_behind(transport: str) -> None:
    pieces = [(n * 4096, 1152) for n in range(32)]
    with Peer(transport) as peer:
        requester = peer.requester()

        def fetch(times: int) -> list[tuple[int, int, int]]:
            for _ in range(times):
                requester.wait(requester.submit(question(pieces), 32 * 1152, 60.0)).release()
            watched = [*peer.processes(), psutil.Process(requester.process.pid)]  # type: ignore[attr-defined]  # Proxy's
            return [(one.memory_info().rss, one.num_fds(), one.num_threads()) for one in watched]

        before = fetch(1000)
        for (rss, *others), (later, *later_others) in zip(before, fetch(10_000), strict=True):
            assert later <= rss * 1.02 + 2**20
            assert later_others <= others
        requester.close()

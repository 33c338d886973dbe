"""Stores that read each other over nixl: what a start refuses, and a process that ends behind the store."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.kvstore.pair import Pair, chain, flags
from tests.kvstore.process import ROOT, KvStore, eventually, token_in
from tests.nixl import NEEDS_NIXL

FEW = 5  # pages; both prefixes find room


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def test_an_open_wire_is_refused(shm: Path, tmp_path: Path) -> None:
    with KvStore(shm / "a", "--data-transport=nixl", logs=tmp_path) as store:
        assert "needs a --wire-dir on every store" in store.refused()


def test_lanes_that_are_demanded_and_not_there_are_refused(shm: Path, tmp_path: Path) -> None:
    told = ("--data-transport=nixl", "--ucx-lanes=rdma")
    with KvStore(shm / "a", *told, logs=tmp_path, wire=token_in(tmp_path / "wire")) as store:
        assert "--ucx-lanes rdma leaves none of --ucx-tls tcp,sm,self" in store.refused()


def test_a_missing_package_is_told_at_the_start(shm: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "nixl_cu13.py").write_text("raise ImportError('not here')\n")
    there = {"PYTHONPATH": f"{empty}:{ROOT}:{ROOT / 'proto'}"}
    wire = token_in(tmp_path / "wire")
    with KvStore(shm / "a", *flags("nixl-tcp"), logs=tmp_path, environment=there, wire=wire) as store:
        assert "pip install --no-deps 'nixl-cu13>=1.5,<1.6'" in store.refused()


@NEEDS_NIXL
def test_the_process_behind_a_store_may_end(stack: ExitStack, shm: Path, tmp_path: Path) -> None:
    pair = Pair(stack, shm, tmp_path, "nixl-tcp", "--pull-seconds=1.5")
    first = pair.at_a.sequence_of(chain("x", FEW), 1)
    eventually(lambda: len(pair.at_b.match(chain("x", FEW))) == FEW, 60)
    second = pair.at_a.sequence_of(chain("y", FEW), 2)
    [child] = psutil.Process(pair.a.process.pid).children()
    child.send_signal(signal.SIGABRT)  # as UCX ends it
    psutil.wait_procs([child], 60)
    eventually(lambda: len(pair.at_b.match(chain("y", FEW))) == FEW, 60)
    for name, written in (("x", first), ("y", second)):
        assert pair.at_b.contents(pair.at_b.match(chain(name, FEW))) == written
    assert pair.a.process.poll() is None
    assert pair.a.metric("hotset_store_data_errors_total", role="served", kind="lost") == 1
    assert "nixl_ended" in pair.a.log

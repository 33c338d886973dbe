"""The order between a GPU's streams in prefill, and that what streams from the arena is what was written.

Ordering tests delay one stream by 100 ms. Each runs twice: once as it is, and once with every wait of one
stream for another left out, where it must see wrong bytes - or it would prove nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from services.decoder.kernels.append import make_records
from tests.gpu.streamed_rig import SHAPE, Rig, is_right, made, sleep

pytestmark = pytest.mark.gpu


@pytest.fixture
def shm() -> Iterator[Path]:
    """Only a file on a tmpfs can be registered."""
    with tempfile.TemporaryDirectory(prefix="hotset-test-", dir="/dev/shm") as directory:
        yield Path(directory)


@contextmanager
def deaf(active: bool) -> Iterator[None]:
    """No stream waits for another."""
    kept = torch.cuda.Stream.wait_event
    if active:
        torch.cuda.Stream.wait_event = lambda self, event: None  # type: ignore[method-assign]  # the fault
    try:
        yield
    finally:
        torch.cuda.Stream.wait_event = kept  # type: ignore[method-assign]  # back again
        torch.cuda.synchronize()


@pytest.mark.parametrize("edge_bytes", [2**33, 10_000])
def test_windows_are_what_was_written(shm: Path, edge_bytes: int) -> None:
    """In chunks that end inside pages and windows, the second time over the first one's leavings."""
    rig = Rig(shm / "arena", edge_bytes)
    for tokens in (1300, 1100):
        key, value = made(tokens)
        for start, end in pairwise([0, 16, 64, 400, 768, 1024, tokens]):
            read = rig.step(key, value, start, end)
            torch.cuda.current_stream().synchronize()
            assert is_right(read, key[:start], value[:start]) or start == 0
            for layer, records in enumerate(rig.stored(end)):
                expected = make_records(key[:end] * (layer + 1), value[:end] * (layer + 1), SHAPE.groups)
                assert torch.equal(records, expected.cpu().view(end, SHAPE.groups, -1))
    untouched = rig.on_host.kv_blocks(1).view(rig.layout.page_count, -1).view(torch.int16)
    written = {int(page) for page in rig.tables.arena_pages(1, 21)}
    assert all((untouched[page] == -1).all() for page in set(range(rig.layout.page_count)) - written)


@pytest.mark.parametrize("ignored", [False, True], ids=["obeyed", "ignored"])
@pytest.mark.parametrize("late", ["computing", "writer"])
def test_a_window_waits_for_the_writes_of_earlier_steps(shm: Path, late: str, ignored: bool) -> None:
    rig = Rig.warm(shm / "arena")
    key, value = made(1000)
    with deaf(ignored):
        with torch.cuda.stream(rig.path.writer if late == "writer" else torch.cuda.current_stream()):
            sleep()
        rig.step(key, value, 0, 960)
        read = rig.step(key, value, 960, 1000)
    assert is_right(read, key[:960], value[:960]) != ignored


@pytest.mark.parametrize("ignored", [False, True], ids=["obeyed", "ignored"])
@pytest.mark.parametrize("late", ["computing", "reader"])
def test_a_window_is_filled_before_and_refilled_after_it_is_read(shm: Path, late: str, ignored: bool) -> None:
    rig = Rig.warm(shm / "arena")
    key, value = made(1000)
    rig.step(key, value, 0, 960)
    torch.cuda.synchronize()
    with torch.cuda.stream(rig.path.reader):
        if late == "reader":
            sleep()
    with deaf(ignored):
        read = rig.step(key, value, 960, 1000, before=sleep if late == "computing" else lambda: None)
    assert is_right(read, key[:960], value[:960]) != ignored


@pytest.mark.parametrize("ignored", [False, True], ids=["obeyed", "ignored"])
def test_what_is_staged_stays_until_it_was_copied(shm: Path, ignored: bool) -> None:
    rig = Rig.warm(shm / "arena")
    key, value = made(960)
    with torch.cuda.stream(rig.path.writer):
        sleep()
    with deaf(ignored):
        rig.step(key, value, 0, 960)
    expected = [make_records(key * n, value * n, SHAPE.groups).cpu() for n in (1, 2, 3)]
    right = all(
        torch.equal(got, want.view(960, SHAPE.groups, -1))
        for got, want in zip(rig.stored(960), expected, strict=True)
    )
    assert right != ignored


@pytest.mark.parametrize("ignored", [False, True], ids=["obeyed", "ignored"])
@pytest.mark.parametrize("late", ["reader", "writer"])
def test_when_a_step_is_done_no_copy_touches_its_pages(shm: Path, late: str, ignored: bool) -> None:
    """The CPU reads them at once, and gives them to somebody who overwrites them."""
    rig = Rig.warm(shm / "arena")
    key, value = made(1000)
    rig.step(key, value, 0, 960)
    torch.cuda.synchronize()
    with torch.cuda.stream(rig.path.reader if late == "reader" else rig.path.writer):
        sleep()
    with deaf(ignored):
        read = rig.step(key, value, 960, 1000)
        torch.cuda.current_stream().synchronize()
        stored = rig.stored(1000)[2]
        for layer in range(SHAPE.layers):
            rig.on_host.kv_blocks(layer).zero_()
    expected = make_records(key * 3, value * 3, SHAPE.groups).view(1000, SHAPE.groups, -1).cpu()
    right = torch.equal(stored, expected) and is_right(read, key[:960], value[:960])
    assert right != ignored


def test_windows_out_of_order_are_refused(shm: Path) -> None:
    rig = Rig(shm / "arena")
    chunk = rig.chunk(512, 600)
    rig.path.begin([chunk], reads=True)
    with pytest.raises(RuntimeError, match="layer 1 asks for"):
        next(rig.path.windows(1, chunk))
    rig.path.begin([chunk], reads=True)  # and the next step begins anew
    next(rig.path.windows(0, chunk))
    torch.cuda.synchronize()

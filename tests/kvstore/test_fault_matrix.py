"""Page pulls from another host: every fault at three moments, and one store that lives through all of them.

Whatever happens, a match ends in time, what it finds has the right bytes, nobody here needs a restart before
the next one finds everything, and no page, pin or answer stays behind. `-s` prints what became of each.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.kvstore.pair import NAMES
from tests.kvstore.process import eventually
from tests.kvstore.rig import LONG, PAGES, PULL_SECONDS, Rig
from tests.nixl import marks_of
from tests.two_hosts import Host, another_host

Act = Callable[[Rig], object]
MEGABYTES_A_SECOND = 8
STOPPED_SECONDS = 5.0
ROOM = 3
MOMENTS = ("before", "in the middle", "between")


@dataclass(frozen=True)
class Fault:
    """What happens to a pull, and what happens later, so that the next one can succeed."""

    strike: Act
    heal: Act


def _stop(rig: Rig) -> None:
    rig.a.signal(signal.SIGSTOP)
    rig.stopped = time.monotonic()


def _go_on(rig: Rig) -> None:
    time.sleep(max(0.0, rig.stopped + STOPPED_SECONDS - time.monotonic()))  # as long as it is to be stopped
    rig.a.signal(signal.SIGCONT)


def _kill(rig: Rig) -> None:
    rig.a.signal(signal.SIGKILL)
    rig.a.process.wait()


def _restart_as_another(rig: Rig) -> None:
    """The pages that were asked for are others' now, in another life of another arena."""
    _kill(rig)
    rig.start_there(anew=True)
    rig.seal(f"others-{rig.lives}")


def _blink(rig: Rig) -> None:
    """The cable is out for a moment, within the pull's time."""
    rig.there.link("down")
    rig.later = threading.Timer(0.3, rig.there.link, ("up",))
    rig.later.start()


def _fill(rig: Rig) -> None:
    """Nearly all room here is taken by others."""
    now = rig.b.stats()
    rig.taken = rig.at_b.update(max(0, now.free_pages + now.cached_pages - ROOM)).pages


def _start_anew(rig: Rig) -> None:
    _kill(rig)
    rig.start_there(anew=True)


FAULTS = {
    "killed": Fault(_kill, Rig.start_there),
    "stopped for 5 s": Fault(_stop, _go_on),
    "link down": Fault(lambda rig: rig.there.link("down"), lambda rig: rig.there.link("up")),
    "link down and back": Fault(_blink, lambda rig: rig.later.join()),
    "restarted with other generations": Fault(_restart_as_another, lambda rig: None),
    "store full": Fault(_fill, lambda rig: rig.at_b.update(releases=rig.taken)),
    "arena unlinked": Fault(lambda rig: rig.a.arena.unlink(), _start_anew),  # that store ends, and says why
}
LOST = {"restarted with other generations", "arena unlinked"}  # what was sealed there; it is computed again
UNREACHABLE = {"killed", "stopped for 5 s", "link down"}


def _mostly_slow(names: Iterable[str], fast: str) -> list[ParameterSet]:
    """All of them, of which only one need not wait for a slow run."""
    return [pytest.param(name, marks=marks_of(name, slow=name != fast)) for name in names]


@pytest.fixture(scope="module")
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One for all faults of a transport; prints its table at the end."""
    shm = Path(tempfile.mkdtemp(prefix="hotset-test-", dir="/dev/shm"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, shm)
        if request.param.endswith("-shm"):  # which UCX does not use across namespaces
            here = there = Host("", "lo", "127.0.0.1")
        else:
            here, there = stack.enter_context(another_host(MEGABYTES_A_SECOND))
        made = Rig(stack, shm, tmp_path_factory.mktemp("logs"), request.param, here, there)
        yield made
        print(f"\n{request.param}: fault | moment | pages found of {PAGES} | in s | all found again in s")
        print("\n".join(made.table))


@pytest.mark.parametrize("rig", _mostly_slow(NAMES, "tcp"), indirect=True)
@pytest.mark.parametrize("moment", _mostly_slow(MOMENTS, "in the middle"))
@pytest.mark.parametrize("fault", _mostly_slow(FAULTS, "link down"))
def test_a_pull_and_a_fault(rig: Rig, fault: str, moment: str) -> None:
    if rig.here is rig.there and fault.startswith("link"):
        pytest.skip("no link lies between two processes of one host")
    name, other = rig.name(), rig.name()
    act = FAULTS[fault]
    rig.seal(name)
    rig.seal(other, 5)
    if moment == "between":
        eventually(lambda: rig.find(other) == 5, LONG)
    if moment != "in the middle":
        act.strike(rig)
    start = time.monotonic()
    found = rig.find_struck(name, lambda: act.strike(rig)) if moment == "in the middle" else rig.find(name)
    took = time.monotonic() - start
    assert took < PULL_SECONDS + LONG
    if fault in UNREACHABLE and moment != "in the middle":
        assert found == 0
    if fault == "store full" and moment != "in the middle":
        assert found <= ROOM
    act.heal(rig)
    start = time.monotonic()
    if fault in LOST:
        rig.seal(name)
    eventually(lambda: rig.find(name) == PAGES, LONG)
    again = time.monotonic() - start
    rig.settle()
    assert rig.b.process.poll() is None
    rig.table.append(f"{fault} | {moment} | {found} | {took:.2f} | {again:.2f}")
    if rig.kept:
        _start_anew(rig)  # rather than wait until nobody can claim what it keeps
        rig.meet()

"""replay.cu against its twin, and a layer that only ever replays against its arena."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch

from services.decoder.kernels.counter import Counter
from services.decoder.kernels.gpu.host_memory import RegisteredMemory
from services.decoder.kernels.gpu.replay import ReplayCall, ReplayShape
from services.decoder.kernels.replay import replay
from services.decoder.kernels.step_kernels import LayerStore, MissPlan
from tests.gpu.test_resolve_gpu import Case, Rig

pytestmark = pytest.mark.gpu

CASES = [
    Case(1152, 64, 1, 1, 48, 64, 400, 8, 80),
    Case(1152, 64, 1, 3, 300, 340, 1500, 4, 60, sweep=True),
    Case(656, 64, 1, 70, 33, 40, 200, 1, 60),
    Case(8192, 4, 8, 3, 24, 48, 100, 8, 60),
    Case(65536, 1, 1, 2, 6, 9, 40, 4, 60),
    Case(16, 64, 8, 200, 16, 24, 40, 1, 40),
]


class Follower:
    """A layer with tables of the rig's, bytes of its own, twice: the kernel's and the twin's."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.memory = mmap.mmap(-1, len(rig.memory))
        self.arena = torch.frombuffer(self.memory, dtype=torch.int32)[: rig.arena.numel()].view(
            rig.arena.shape
        )
        self.arena.random_(generator=torch.Generator().manual_seed(2))
        self.registered = RegisteredMemory(self.arena.data_ptr(), len(self.memory))
        self.pool = torch.zeros_like(rig.call.pool)
        assert rig.call.plan is not None
        self.call = ReplayCall(
            plan=rig.call.plan,
            arena_pointer=self.registered.device_address,
            pool=self.pool,
            counters=torch.zeros(len(Counter), dtype=torch.int64, device="cuda"),
            waited_until=torch.zeros(1, dtype=torch.int64, device="cuda"),
        )
        self.shape = ReplayShape(rig.case.block_bytes)
        self.call.check(self.shape)
        counters = torch.zeros_like(self.call.counters)
        self.twin = LayerStore(rig.twin.tables, self.pool.clone(), self.arena.cuda(), counters)
        self.wrong = torch.zeros((), dtype=torch.bool, device="cuda")
        self._fill_open_blocks()

    def _fill_open_blocks(self) -> None:
        """Rows sit with their open block in each lane's first slot; in an engine its bytes come with them."""
        rig, case = self.rig, self.rig.case
        opened = torch.tensor(rig.newest, device="cuda")
        lanes = torch.arange(case.rows * case.groups, device="cuda")
        page = rig.host_pages.gather(1, (opened // case.blocks_per_page).unsqueeze(1)).squeeze(1)
        group = torch.arange(case.groups, device="cuda")
        home = (page.unsqueeze(1) * case.groups + group) * case.blocks_per_page
        home = (home + (opened % case.blocks_per_page).unsqueeze(1)).flatten()
        places = rig.gpu.places(lanes, case.parcel_slots)[:, 0]
        arena = self.twin.arena
        assert arena is not None
        for pool in (self.pool, self.twin.pool):
            pool[places] = arena[home]

    def step(self) -> None:
        step = self.rig.step()
        real = step.selected.shape[0]
        self.call.launch(self.shape)
        plan = self.call.plan
        replay(self.twin, MissPlan(plan.source[:real], plan.target[:real], plan.count[:real]))
        # Append fills the open block, in a layer of either kind.
        open_slot = self.rig.call.open_slot[:real].long()
        arena = self.twin.arena
        assert arena is not None
        opened = arena[step.home.gather(1, step.opened).squeeze(1)]
        self.pool[open_slot] = opened
        self.twin.pool[open_slot] = opened
        self.wrong |= (self.pool != self.twin.pool).any()
        chosen = step.selected >= 0
        slots = self.rig.call.slots[:real][chosen].long()
        home = step.home.gather(1, step.selected.clamp_min(0))[chosen]
        self.wrong |= (self.pool[slots] != arena[home]).any()

    def close(self) -> None:
        torch.cuda.synchronize()
        self.registered.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_follower_holds_what_the_anchor_chose(case: Case) -> None:
    rig = Rig(case, disturbed=False)
    follower = Follower(rig)
    try:
        for _ in range(case.steps):
            follower.step()
        rig.agree()
        assert not bool(follower.wrong), "a hot slot holds other bytes than its block"
        wanted = follower.twin.counters[: Counter.NANOSECONDS].tolist()
        assert follower.call.counters[: Counter.NANOSECONDS].tolist() == wanted
        assert wanted[Counter.MISSES] > 0
        assert int(follower.call.counters[Counter.NANOSECONDS]) > 0
    finally:
        follower.close()
        rig.close()


def test_probe_moves_no_bytes() -> None:
    rig = Rig(CASES[0], disturbed=False)
    follower = Follower(rig)
    follower.shape = replace(follower.shape, skip_io=True)
    try:
        follower.step()
        assert int(follower.call.counters[Counter.MISSES]) > 0
        target = follower.call.plan.target[0, : int(follower.call.plan.count[0])].long()
        assert not bool(follower.pool[target].any())
    finally:
        follower.close()
        rig.close()


def test_a_wrong_call_is_refused_by_name() -> None:
    rig = Rig(CASES[0], disturbed=False)
    follower = Follower(rig)
    call, plan = follower.call, follower.call.plan
    try:
        with pytest.raises(ValueError, match=r"plan\.source must be a contiguous int32"):
            replace(call, plan=replace(plan, source=plan.source.long())).check(follower.shape)
        with pytest.raises(ValueError, match=r"plan\.count \[lanes\]"):
            replace(call, plan=replace(plan, count=plan.count[:1])).check(follower.shape)
        with pytest.raises(ValueError, match="pool rows must be 16"):
            call.check(ReplayShape(16))
        with pytest.raises(ValueError, match=r"counters must be \[6\]"):
            replace(call, counters=call.counters[:5]).check(follower.shape)
    finally:
        follower.close()
        rig.close()

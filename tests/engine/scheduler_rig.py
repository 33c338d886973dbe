"""A scheduler under test: a fake runner, an arena that may be moody, and what clients have seen."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

from services.contract.errors import Unavailable
from services.decoder.engine.limits import Limits
from services.decoder.engine.page_hash import PageHasher
from services.decoder.engine.scheduler import Scheduler
from services.decoder.engine.sequence import Finish, Sampling, Sequence
from services.decoder.engine.stepper import Stepper
from services.decoder.kv.device_pages import DevicePages
from tests.engine.fake_runner import VOCAB, FakeRunner, answer
from tests.engine.fake_stores import MoodyPages, OneOfTwo

PATIENCE = 4000
"""Steps after which a sequence that has not ended counts as starved."""


@dataclass
class Rig:
    """A scheduler, its fake runner, and the answers as clients have seen them."""

    limits: Limits
    host: MoodyPages | OneOfTwo
    device: DevicePages
    ahead: bool = False  # the next step is launched before this one is booked
    shares: bool = False  # prompts that begin alike share pages
    late: random.Random | None = None  # found pages are loaded beside the steps, and come some time
    scheduler: Scheduler = field(init=False)
    runner: FakeRunner = field(init=False)
    stepper: Stepper = field(init=False)
    seen: dict[Sequence, list[int]] = field(default_factory=dict)
    ended: list[Sequence] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        hasher = PageHasher(b"model", b"decoding", self.limits.page_tokens) if self.shares else None
        beside = self.late is not None
        self.scheduler = Scheduler(self.limits, self.host, self.device, hasher, loads_beside=beside)
        self.runner = FakeRunner(
            self.limits, runs_ahead=self.ahead, references=self.host.pages.references, chance=self.late
        )
        self.stepper = Stepper(self.scheduler, self.runner, nullcontext())

    @classmethod
    def make(
        cls,
        *,
        host: int = 8,
        device: int = 8,
        mood: random.Random | None = None,
        ahead: bool = False,
        shares: bool = False,
        store: OneOfTwo | None = None,
        **changes: int,
    ) -> Rig:
        base = {
            "max_rows": 3,
            "max_model_len": 64,
            "max_step_tokens": 16,
            "max_waiting": 4,
            "block_tokens": 4,
            "page_tokens": 8,
        }
        pages = store or MoodyPages(host, mood)
        return cls(Limits(**base | changes), pages, DevicePages(device), ahead, shares)

    @property
    def fed(self) -> int:
        """Tokens computed so far, in vain or again included."""
        return self.runner.fed

    def step_until(self, true: Callable[[], object]) -> None:
        """Steps, until something is so."""
        for _ in range(PATIENCE):
            if true():
                return
            self.step()
        raise AssertionError("it does not come")

    def submit(self, *sequences: Sequence) -> None:
        self.scheduler.submit(list(sequences))
        self.seen |= {sequence: [] for sequence in sequences}
        self.scheduler.check_integrity()

    def step(self) -> None:
        """One step, or a failed try of one."""
        self.steps += 1
        before, refused = self.host.calls, self.host.refusals
        try:
            _, news = self.stepper.step()
        except Unavailable:
            self.scheduler.check_integrity()
            return
        finally:
            most = (1 + self.ahead) * (1 + self.shares)
            most += self.host.refusals - refused  # then whatever else can go back goes
            assert self.host.calls - before <= most, "more exchanges than the step needed"
        assert len({sequence for sequence, _ in news}) == len(news)
        for sequence, tokens in news:
            self.seen[sequence] += [token.token for token in tokens]
            if sequence.finish:
                self.ended.append(sequence)
        self.check()

    def abort(self, request_id: str, choices: set[int] | None = None) -> list[Sequence]:
        ended = self.scheduler.abort(request_id, choices or set())
        self.ended += ended
        self.check()
        return ended

    def check(self) -> None:
        self.scheduler.check_integrity()
        alive = [*self.scheduler.waiting, *self.scheduler.running]
        assert len(set(alive)) == len(alive)
        assert not {sequence for sequence in alive if sequence.finish}, "a finished sequence is still there"
        assert set(self.seen) == {*alive, *self.ended}, "a sequence got lost"
        assert len(self.ended) == len(set(self.ended)), "a sequence ended twice"
        for queue in (self.scheduler.waiting, self.scheduler.running):
            assert [s.rank for s in queue] == sorted(s.rank for s in queue)

    def finish(self) -> None:
        """Run until nothing is left, and everything is back where it came from."""
        for _ in range(PATIENCE):
            if not self.stepper.has_work:
                break
            self.step()
        else:
            waiting, running = len(self.scheduler.waiting), len(self.scheduler.running)
            raise AssertionError(f"starved: {waiting} waiting, {running} running")
        assert self.host.lent == 0
        assert self.device.free == self.device.count
        self.check()


def sequence(
    prompt: int = 5,
    max_tokens: int = 4,
    *,
    name: str = "r",
    choice: int = 0,
    priority: int = 0,
    seed: int = 0,
    stop: frozenset[int] = frozenset(),
    least: int = 0,
    known: list[int] | None = None,
    common: int = 0,
    salt: bytes = b"",
) -> Sequence:
    """`common` tokens are every such prompt's, what follows them is its own."""
    everybodys, chance = random.Random("common"), random.Random(repr((name, prompt, seed)))
    return Sequence(
        request_id=name,
        choice=choice,
        prompt=[(everybodys if at < common else chance).randrange(VOCAB) for at in range(prompt)],
        salt=salt,
        sampling=Sampling(),
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=least,
        stop_ids=stop,
        priority=priority,
        known=known or [],
        reported=len(known or []),
    )


def expected(one: Sequence) -> list[int]:
    return answer(one.prompt, one.seed, one.max_tokens, one.stop_ids, one.min_tokens)


def check_answer(rig: Rig, one: Sequence) -> None:
    """A sequence that was left alone has ended with exactly its answer, each token told once."""
    right = expected(one)
    assert one.generated == right
    assert rig.seen[one] == right
    stopped = bool(right) and right[-1] in one.stop_ids and len(right) > one.min_tokens
    assert one.finish is (Finish.STOP if stopped else Finish.LENGTH)

"""The scheduler under random traffic, tiny pools and a store that fails: nothing lost, nothing twice."""

from __future__ import annotations

import random
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.contract.errors import InvalidRequest, NoRoom, Unavailable
from services.decoder.engine.host_pages import HostPage, LocalPages, SealOrder
from services.decoder.engine.limits import Limits
from services.decoder.engine.page_hash import PageHasher
from services.decoder.engine.scheduler import Scheduler
from services.decoder.engine.sequence import Finish, Sampling, Sequence
from services.decoder.engine.stepper import Stepper
from services.decoder.kv.device_pages import DevicePages
from tests.engine.fake_runner import VOCAB, FakeRunner, answer

PATIENCE = 4000
"""Steps after which a sequence that has not ended counts as starved."""


class MoodyPages:
    """An arena shared with others: now and then they are quicker, or the store is out of reach."""

    def __init__(self, total: int, mood: random.Random | None) -> None:
        self.pages = LocalPages(total)
        self.mood = mood
        self.calls = 0
        self.failures = 0

    @property
    def total(self) -> int:
        return self.pages.total

    @property
    def free(self) -> int:
        return self.pages.free

    @property
    def lent(self) -> int:
        return self.pages.lent

    def look(self) -> None:
        self.pages.look()

    def match(self, page_hashes: Collection[bytes]) -> list[HostPage]:
        if self.mood and self.mood.random() < 0.1:
            self.failures += 1
            raise Unavailable("the store is out of reach")
        return self.pages.match(list(page_hashes))

    def exchange(
        self, give: list[HostPage], want: int, seals: Collection[SealOrder] = ()
    ) -> list[HostPage] | None:
        self.calls += 1
        chance = self.mood.random() if self.mood else 1.0
        if chance < 0.15:
            self.failures += 1
            raise Unavailable("the store is out of reach")
        if chance < 0.3 and want:
            self.failures += 1
            assert self.pages.exchange(give, 0, list(seals)) == []
            return None
        return self.pages.exchange(give, want, list(seals))


@dataclass
class Rig:
    """A scheduler, its fake runner, and the answers as clients have seen them."""

    limits: Limits
    host: MoodyPages
    device: DevicePages
    ahead: bool = False  # the next step is launched before this one is booked
    shares: bool = False  # prompts that begin alike share pages
    scheduler: Scheduler = field(init=False)
    runner: FakeRunner = field(init=False)
    stepper: Stepper = field(init=False)
    seen: dict[Sequence, list[int]] = field(default_factory=dict)
    ended: list[Sequence] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        hasher = PageHasher(b"model", b"decoding", self.limits.page_tokens) if self.shares else None
        self.scheduler = Scheduler(self.limits, self.host, self.device, hasher)
        self.runner = FakeRunner(self.limits, runs_ahead=self.ahead)
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
        return cls(Limits(**base | changes), MoodyPages(host, mood), DevicePages(device), ahead, shares)

    def submit(self, *sequences: Sequence) -> None:
        self.scheduler.submit(list(sequences))
        self.seen |= {sequence: [] for sequence in sequences}
        self.scheduler.check_integrity()

    def step(self) -> None:
        """One step, or a failed try of one."""
        self.steps += 1
        before = self.host.calls
        try:
            _, news = self.stepper.step()
        except Unavailable:
            self.scheduler.check_integrity()
            return
        finally:
            most = 1 + self.ahead + self.shares
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
        assert self.host.free == self.host.total
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


@st.composite
def traffic(draw: st.DrawFn) -> tuple[Rig, list[tuple[int, Sequence]], random.Random, bool]:
    page = draw(st.sampled_from([4, 8, 12]))
    block = draw(st.sampled_from([1, 2, 4]))
    rows = draw(st.integers(1, 5))
    host, device = draw(st.integers(2, 14)), draw(st.integers(2, 14))
    moody = draw(st.booleans())
    chance = random.Random(draw(st.integers(0, 2**32)))
    rig = Rig.make(
        host=host,
        device=device,
        mood=chance if moody else None,
        ahead=draw(st.booleans()),
        shares=draw(st.booleans()),
        max_rows=rows,
        max_step_tokens=rows + block + draw(st.integers(0, 20)),
        max_waiting=100,
        max_model_len=draw(st.integers(6, 120)),
        block_tokens=block,
        page_tokens=page,
    )
    most = min(rig.limits.max_model_len, host * page, device * page)
    arrivals = []
    for number in range(draw(st.integers(1, 14))):
        prompt = chance.randint(1, most)
        one = sequence(
            prompt,
            chance.randint(0, most - prompt),
            name=str(number // 2),
            choice=number % 2,
            priority=chance.choice([0, 0, 0, 1, -1]),
            seed=number,
            stop=frozenset(chance.sample(range(VOCAB), chance.choice([0, 0, 5]))),
            least=chance.choice([0, 0, 3]),
            common=chance.choice([0, prompt // 2, prompt]),
            salt=chance.choice([b"", b"", b"tenant"]),
        )
        arrivals.append((chance.choice([0, 0, 1, 3, 10]), one))
    return rig, arrivals, chance, draw(st.booleans())


@settings(max_examples=250, deadline=None)
@given(traffic())
def test_any_traffic_ends_well(case: tuple[Rig, list[tuple[int, Sequence]], random.Random, bool]) -> None:
    rig, arrivals, chance, aborting = case
    aborted: set[Sequence] = set()
    for pause, one in arrivals:
        rig.submit(one)
        for _ in range(pause):
            rig.step()
        if aborting and chance.random() < 0.3:
            aborted |= set(rig.abort(str(chance.randrange(9)), chance.choice([set(), {0}, {1}, {0, 1}])))
    rig.finish()
    for one in rig.seen:
        if one in aborted:
            assert one.finish is Finish.ABORT
            assert rig.seen[one] == expected(one)[: len(rig.seen[one])]
        else:
            check_answer(rig, one)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_a_resumed_answer_goes_on_where_the_client_left_it(seed: int) -> None:
    """After an engine's restart: known tokens are replayed and not told again, preempted or not."""
    chance = random.Random(seed)
    rig = Rig.make(host=6, mood=chance if chance.random() < 0.5 else None)
    parts = []
    for number in range(4):
        fresh = sequence(chance.randint(1, 20), chance.randint(1, 25), name=str(number), seed=number)
        right = expected(fresh)
        cut = chance.randint(0, len(right))
        one = sequence(len(fresh.prompt), fresh.max_tokens, name=str(number), seed=number, known=right[:cut])
        parts.append((one, right, cut))
        rig.submit(one)
    rig.finish()
    for one, right, cut in parts:
        assert one.generated == right
        assert rig.seen[one] == right[cut:]
        assert one.finish is Finish.LENGTH


def test_short_of_pages_the_youngest_waits_and_loses_nothing() -> None:
    rig = Rig.make(host=6)
    crowd = [sequence(6, 30, name=str(i), seed=i) for i in range(3)]
    for one in crowd:
        rig.submit(one)
    order: list[Sequence] = []
    for _ in range(PATIENCE):
        rig.step()
        order += [one for one in rig.ended if one not in order]
        if not rig.scheduler.has_work:
            break
    rig.finish()
    assert rig.scheduler.releases > 0
    assert order[0] is crowd[0], "the oldest must go on"
    for one in crowd:
        check_answer(rig, one)


def test_the_most_urgent_runs_first_and_waits_last() -> None:
    rig = Rig.make(max_rows=1)
    low, high = sequence(name="low", priority=5), sequence(name="high", priority=-5)
    rig.submit(low, high)
    rig.finish()
    assert rig.ended == [high, low]


@pytest.mark.parametrize("length", [63, 64])
def test_a_sequence_that_just_fits_runs_alone(length: int) -> None:
    """Everything there is, to the last token: of the pages, and of the longest length allowed."""
    for max_tokens in (0, 1, 2, 30):
        rig = Rig.make(host=8, device=8, max_model_len=64)
        one = sequence(length - max_tokens, max_tokens)
        rig.submit(one)
        rig.finish()
        check_answer(rig, one)


def test_replaying_a_whole_answer_needs_no_more_room_than_giving_it() -> None:
    rig = Rig.make()
    whole = expected(sequence(40, 24))
    one = sequence(40, 24, known=whole)
    rig.submit(one)
    rig.finish()
    assert (one.generated, rig.seen[one], one.finish) == (whole, [], Finish.LENGTH)


@pytest.mark.parametrize(
    ("max_model_len", "host", "device", "most"),
    [(64, 8, 8, 64), (20, 8, 8, 20), (64, 5, 8, 40), (64, 8, 3, 24)],
)
def test_what_can_never_run_is_refused_at_once(max_model_len: int, host: int, device: int, most: int) -> None:
    rig = Rig.make(max_model_len=max_model_len, host=host, device=device)
    rig.submit(sequence(most - 4, 4, name="fits"))
    with pytest.raises(InvalidRequest) as refusal:
        rig.submit(sequence(most - 4, 5, name="too long"))
    for number in (most - 4, 5, most + 1, most):
        assert str(number) in str(refusal.value)
    with pytest.raises(InvalidRequest, match="no tokens"):
        rig.submit(sequence(0, 3))
    rig.submit(sequence(3, 3, name="after"))
    rig.finish()
    assert len(rig.ended) == 2


def test_a_request_is_taken_whole_or_not_at_all() -> None:
    rig = Rig.make()
    with pytest.raises(InvalidRequest):
        rig.submit(sequence(5, 5), sequence(60, 5, choice=1))
    assert not rig.scheduler.has_work


def test_a_full_queue_says_so_and_recovers() -> None:
    rig = Rig.make(max_rows=2, max_waiting=3)
    for number in range(5):
        rig.submit(sequence(name=str(number)))
    with pytest.raises(NoRoom, match="5 choices are waiting already; try again later"):
        rig.submit(sequence(name="one too many"))
    rig.step()
    with pytest.raises(NoRoom):
        rig.submit(sequence(name="still too many"))
    rig.finish()
    rig.submit(sequence(name="later"))
    rig.finish()
    assert len(rig.ended) == 6


def test_more_choices_than_could_ever_wait_are_refused_for_good() -> None:
    rig = Rig.make(max_rows=2, max_waiting=3)
    with pytest.raises(InvalidRequest, match=r"6 choices .* at most 5"):
        rig.submit(*(sequence(choice=i) for i in range(6)))
    rig.submit(*(sequence(choice=i, seed=i) for i in range(5)))
    rig.finish()


def test_no_queue_at_all_still_serves_idle_rows() -> None:
    rig = Rig.make(max_rows=2, max_waiting=0)
    rig.submit(sequence(name="a"), sequence(name="b"))
    with pytest.raises(NoRoom):
        rig.submit(sequence(name="c"))
    rig.finish()


def test_abort_in_every_state() -> None:
    rig = Rig.make(max_rows=2, max_step_tokens=8, max_waiting=9)
    decoding, prefilling, waiting = (
        sequence(3, 30, name="decoding"),
        sequence(30, 4, name="prefilling"),
        sequence(name="waiting"),
    )
    rig.submit(decoding)
    rig.step()
    rig.submit(prefilling)
    rig.step()
    rig.submit(waiting)
    rig.step()
    assert decoding.generated
    assert prefilling.is_prefilling
    assert prefilling.computed > 0
    assert waiting.row is None
    for one in (waiting, prefilling, decoding):
        assert rig.abort(one.request_id) == [one]
        assert one.finish is Finish.ABORT
        assert rig.abort(one.request_id) == [], "twice"
    assert rig.abort("unknown") == []
    rig.finish()
    assert rig.scheduler.running == rig.scheduler.waiting == []


def test_abort_of_a_parked_and_of_a_finished_sequence() -> None:
    rig = Rig.make(host=6)
    crowd = [sequence(6, 30, name=str(i), seed=i) for i in range(3)]
    rig.submit(*crowd)
    while not rig.scheduler.releases:
        rig.step()
    parked = next(one for one in crowd if one.known)
    assert parked.row is None
    assert rig.abort(parked.request_id) == [parked]
    rig.finish()
    assert rig.abort(crowd[0].request_id) == []
    for one in crowd:
        if one is not parked:
            check_answer(rig, one)


def test_abort_of_some_choices_leaves_the_others() -> None:
    rig = Rig.make()
    siblings = [sequence(5, 9, choice=i, seed=i) for i in range(3)]
    rig.submit(*siblings)
    rig.step()
    assert rig.abort("r", {1, 7}) == [siblings[1]]
    rig.finish()
    check_answer(rig, siblings[0])
    check_answer(rig, siblings[2])


def test_a_failed_step_ends_its_sequences_and_frees_everything() -> None:
    rig = Rig.make()
    one, other = sequence(name="a"), sequence(name="b")
    rig.submit(one, other)
    plan = rig.scheduler.plan()
    rig.scheduler.fail(one, "out of memory")
    rig.ended.append(one)
    assert (one.finish, one.error) == (Finish.ERROR, "out of memory")
    assert plan.tokens == 10
    rig.scheduler.check_integrity()
    rig.scheduler.fail(other, "out of memory")
    rig.ended.append(other)
    rig.finish()


def test_a_token_that_could_not_be_chosen_ends_its_sequence_alone() -> None:
    rig = Rig.make()
    sick, sound = sequence(name="sick"), sequence(name="sound")
    rig.submit(sick, sound)
    plan = rig.scheduler.plan()
    sampled = rig.runner.run(plan)
    assert sick.row is not None
    del sampled[sick.row]
    news = dict(rig.scheduler.apply(plan, sampled))
    assert (sick.finish, news[sick]) == (Finish.ERROR, [])
    assert "not a number" in sick.error
    rig.seen[sound] += [token.token for token in news[sound]]
    rig.ended.append(sick)
    rig.finish()
    check_answer(rig, sound)


def test_long_prompts_go_in_chunks_beside_decodes() -> None:
    """A running answer gets a token in every step while a long prompt is prefilled."""
    rig = Rig.make(max_step_tokens=9)
    talking, reading = sequence(3, 12, name="talking"), sequence(40, 3, name="reading")
    rig.submit(talking)
    rig.step()
    rig.submit(reading)
    while reading.is_prefilling:
        before = len(talking.generated), reading.computed
        rig.step()
        assert len(talking.generated) == before[0] + 1
        assert 0 < reading.computed - before[1] <= 8
    rig.finish()
    check_answer(rig, talking)
    check_answer(rig, reading)


def test_an_idle_scheduler_calls_nobody() -> None:
    rig = Rig.make()
    rig.submit(sequence(3, 3))
    rig.finish()
    calls = rig.host.calls
    assert not rig.scheduler.has_work
    assert calls <= 3, "one for the pages, one to give them back"
    rig.step()
    assert rig.host.calls == calls


def test_running_ahead_gives_the_same_answers_and_stays_ahead() -> None:
    """Steady rows run ahead through page edges; one that stops computes once in vain and frees all it had."""
    rig = Rig.make(host=16, device=16, ahead=True, page_tokens=8, max_model_len=40)
    steady = sequence(5, 30, name="steady")
    stops = next(
        one
        for seed in range(1000)
        if 8 < len(expected(one := sequence(5, 30, name="stops", seed=seed, stop=frozenset({7})))) < 20
    )
    rig.submit(steady, stops)
    rig.finish()
    check_answer(rig, steady)
    check_answer(rig, stops)
    assert rig.runner.launched_ahead > 20


def test_an_abort_while_a_step_is_ahead_frees_nothing_too_early() -> None:
    rig = Rig.make(host=16, device=16, ahead=True)
    one, other = sequence(5, 40, name="one"), sequence(5, 40, name="other")
    rig.submit(one, other)
    for _ in range(4):
        rig.step()
    free = rig.host.free
    assert rig.abort("one") == [one]
    assert rig.host.free == free, "pages went back while a step that writes them was running"
    rig.step()
    assert rig.host.free == free
    rig.finish()
    check_answer(rig, other)


def prefilled(rig: Rig, one: Sequence) -> int:
    """Prompt tokens that were computed for a sequence that runs alone; it ends with its answer."""
    rig.submit(one)
    before = one.cached
    rig.finish()
    check_answer(rig, one)
    assert before == 0
    return len(one.prompt) - one.cached


def test_a_prompt_is_computed_once() -> None:
    rig = Rig.make(shares=True, host=16, device=16, page_tokens=8, max_model_len=64)
    assert prefilled(rig, sequence(30, 4, name="first", common=30)) == 30
    assert prefilled(rig, sequence(30, 4, name="again", common=30)) == 30 - 24, "the last page is not full"
    assert prefilled(rig, sequence(32, 4, name="longer", common=30)) == 32 - 24
    assert prefilled(rig, sequence(24, 4, name="all of it", common=30)) == 24 - 16, "one token must be left"
    assert prefilled(rig, sequence(30, 4, name="other", common=12)) == 30 - 8
    assert prefilled(rig, sequence(30, 4, name="tenant", common=30, salt=b"t")) == 30
    assert prefilled(rig, sequence(30, 4, name="tenant 2", common=30, salt=b"t")) == 30 - 24


def test_rows_that_run_side_by_side_share_pages_and_leave_them_to_each_other() -> None:
    rig = Rig.make(shares=True, host=12, device=16, page_tokens=8, max_model_len=64)
    first = sequence(40, 12, name="first", common=40)
    rig.submit(first)
    while first.is_prefilling:
        rig.step()
    rig.step()  # brings the seals to the store
    others = [sequence(40, 3, name=str(i), common=40) for i in range(2)]
    rig.submit(*others)
    rig.finish()
    for one in (first, *others):
        check_answer(rig, one)
    assert [one.cached for one in others] == [32, 32]


def test_cached_pages_make_way_for_those_who_need_room() -> None:
    rig = Rig.make(shares=True, host=6, device=6, page_tokens=8, max_model_len=48)
    for number in range(12):
        assert prefilled(rig, sequence(33, 4, name=str(number), common=0)) == 33
    assert prefilled(rig, sequence(33, 4, name="11", common=0)) < 33, "the newest is still there"


def test_whoever_wants_the_prompts_log_probabilities_computes_it() -> None:
    rig = Rig.make(shares=True, host=16, device=16, page_tokens=8, max_model_len=64)
    prefilled(rig, sequence(30, 4, name="first", common=30))
    again = sequence(30, 4, name="again", common=30)
    again.sampling = Sampling(prompt_logprobs=True)
    assert prefilled(rig, again) == 30


def test_an_answers_pages_are_named_by_where_it_began() -> None:
    hasher = PageHasher(b"model", b"quest", 8)
    one, other = sequence(8, 9), sequence(16, 9)
    other.prompt = [*one.prompt, *range(8)]
    one.generated = list(range(8))
    first, second = hasher.extend(one, 2), hasher.extend(other, 2)
    assert first[0] == second[0]
    assert first[1] != second[1], "decoded KV passed for prefilled"
    elsewhere = PageHasher(b"model", b"everything", 8)
    one.page_hashes = []
    assert elsewhere.extend(one, 2)[0] == first[0]
    assert elsewhere.extend(one, 2)[1] != first[1]


def test_the_choices_of_a_request_compute_its_prompt_once() -> None:
    rig = Rig.make(shares=True, host=24, device=24, max_rows=3, page_tokens=8, max_model_len=64)
    siblings = [sequence(37, 6, choice=i, common=37, seed=i) for i in range(3)]
    rig.submit(*siblings)
    rig.finish()
    for one in siblings:
        check_answer(rig, one)
    assert [one.cached for one in siblings] == [0, 32, 32]

"""The scheduler under random traffic, tiny pools and a store that fails: nothing lost, nothing twice."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.contract.errors import InvalidRequest, NoRoom
from services.decoder.engine import admission
from services.decoder.engine.host_pages import HostPage
from services.decoder.engine.page_hash import PageHasher
from services.decoder.engine.sequence import Finish, Sampling, Sequence
from services.decoder.engine.step_plan import StepPlan
from tests.engine.fake_runner import VOCAB, UnderWay
from tests.engine.scheduler_rig import PATIENCE, Rig, check_answer, expected, sequence


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


def test_the_store_is_not_asked_for_one_that_cannot_fit_whatever_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six rows of five or six device pages where eleven are: as rows end, only who gets one of them asks."""
    rig = Rig.make(shares=True, host=60, device=11, max_model_len=48, max_rows=6, max_waiting=9)
    for number in range(6):
        assert prefilled(rig, sequence(33, 4, name=str(number))) == 33
    asked, match = [], rig.host.match

    def counted(page_hashes: Collection[bytes], prompt: Collection[int] = ()) -> list[HostPage]:
        asked.append(len(page_hashes))
        return match(page_hashes, prompt)

    monkeypatch.setattr(rig.host, "match", counted)
    many = [sequence(33, 3 + number, name=str(number)) for number in range(6)]
    rig.submit(*many)
    rig.finish()
    assert [one.cached for one in many] == [32] * 6
    assert asked == [4] * 6


@pytest.mark.parametrize("ahead", [False, True])
def test_a_burst_is_let_in_step_by_step_beside_rows_that_decode(
    monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Each newcomer asks the store for its four pages, and a step may ask for five: so two a step."""
    monkeypatch.setattr(admission, "MANY_PAGES", 4)
    rig = Rig.make(
        shares=True, ahead=ahead, host=99, device=99, max_rows=9, max_waiting=9, max_step_tokens=99
    )
    prefilled(rig, sequence(33, 4, name="first", common=32))
    talks = sequence(5, 40, name="talks")
    rig.submit(talks)
    rig.step_until(lambda: len(talks.generated) > 2)
    many = [sequence(33, 20, name=str(number), common=32) for number in range(6)]
    rig.submit(*many)
    running = []
    while len(rig.scheduler.running) < 7:
        running.append(len(rig.scheduler.running))
        rig.step()
    assert running == [1, 3, 5]
    rig.finish()
    for one in (talks, *many):
        check_answer(rig, one)


def loads_of(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(host page, device page) as plans load them from now on."""
    loads, launch = list[tuple[int, int]](), rig.runner.launch

    def noted(plan: StepPlan) -> UnderWay:
        loads.extend(plan.loads)
        return launch(plan)

    monkeypatch.setattr(rig.runner, "launch", noted)
    return loads


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_with_a_common_prefix_share_its_device_pages(
    monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Sixteen device pages hold six rows of five each: four are everybody's, and are loaded once."""
    rig = Rig.make(shares=True, ahead=ahead, host=60, device=16, max_model_len=40, max_rows=6, max_waiting=9)
    assert prefilled(rig, sequence(33, 4, name="first", common=32)) == 33
    loads = loads_of(rig, monkeypatch)
    many = [sequence(33, 7, name=str(number), common=32) for number in range(6)]
    rig.submit(*many)
    rig.step_until(lambda: len(rig.scheduler.running) == 6)
    rig.step()
    assert len(loads) == 4
    assert rig.device.free == 6
    rig.abort("0")  # who had them loaded goes, and they stay
    rig.finish()
    assert len(loads) == 4
    for one in many[1:]:
        check_answer(rig, one)


def test_who_was_refused_is_tried_again_when_another_lays_out_its_beginning() -> None:
    """It lacks device pages until one that passed it has brought four of them."""
    rig = Rig.make(shares=True, host=90, device=14, max_rows=4, max_waiting=9, max_model_len=100)
    prefilled(rig, sequence(33, 2, name="first", common=32))
    runs = sequence(33, 4, name="runs")
    rig.submit(runs)
    rig.step_until(lambda: runs.generated)
    waits, passes = sequence(73, 3, name="waits", common=32), sequence(33, 30, name="passes", common=32)
    rig.submit(waits, passes)
    rig.step_until(lambda: runs.finish)
    assert waits.row is None
    rig.step_until(lambda: waits.generated)
    assert not passes.finish
    rig.finish()
    for one in (runs, waits, passes):
        check_answer(rig, one)


def test_what_is_free_is_asked_for_where_nobody_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine had the pages when this one heard of them last."""
    rig = Rig.make(shares=True, host=20, device=20, max_model_len=40)
    free = rig.host.pages.free
    known = [0]
    match = rig.host.match

    def looks(page_hashes: Collection[bytes], prompt: Collection[int] = ()) -> list[HostPage]:
        known[0] = free
        return match(page_hashes, prompt)

    monkeypatch.setattr(rig.host, "match", looks)
    monkeypatch.setattr(type(rig.host), "free", property(lambda self: known[0]))
    rig.submit(one := sequence(33, 4))
    rig.step()
    assert one.computed > 0


def test_choices_of_one_prompt_are_hashed_once() -> None:
    rig = Rig.make(shares=True, host=20, device=20, max_model_len=40)
    many = [sequence(33, 4, choice=choice) for choice in range(3)]
    other = sequence(33, 4, choice=3, salt=b"tenant")
    rig.scheduler.prepare([*many, other])
    assert len(many[0].page_hashes) == 4
    assert many[0].page_hashes == many[1].page_hashes == many[2].page_hashes
    assert many[1].page_hashes is not many[0].page_hashes
    assert not set(other.page_hashes) & set(many[0].page_hashes)


def test_nobody_is_made_to_wait_for_pages_that_stay_shared() -> None:
    """Three rows over one beginning; an urgent one wants more device pages than all of them would leave."""
    rig = Rig.make(shares=True, host=60, device=16, max_model_len=80, max_rows=4, max_waiting=9)
    prefilled(rig, sequence(41, 4, name="first", common=41))
    stays = sequence(41, 20, name="stays", common=41)
    others = [sequence(41, 20, name=str(number), common=41, priority=2) for number in range(2)]
    rig.submit(stays, *others)
    rig.step_until(lambda: all(one.generated for one in (stays, *others)))
    urgent = sequence(75, 4, name="urgent", priority=1)
    rig.submit(urgent)
    rig.step_until(lambda: stays.finish)
    assert rig.scheduler.parkings == 0
    assert not urgent.generated
    rig.finish()
    for one in (stays, *others, urgent):
        check_answer(rig, one)


def test_a_page_that_a_row_has_just_filled_is_shared_with_the_next() -> None:
    rig = Rig.make(shares=True, host=20, device=16, max_model_len=40)
    first, second = (sequence(32, 7, name=name, common=32) for name in ("first", "second"))
    rig.submit(first)
    rig.step_until(lambda: first.generated)
    rig.submit(second)
    rig.step_until(lambda: second.device_pages)
    assert second.device_pages[:3] == first.device_pages[:3]
    assert second.device_pages[3] != first.device_pages[3], "one token must be left to compute"
    rig.finish()
    for one in (first, second):
        check_answer(rig, one)


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

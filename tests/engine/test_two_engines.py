"""Two engines on one store: each gets done, whatever the other one holds, and nobody waits for ever."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from services.decoder.engine.host_pages import LocalPages
from services.decoder.engine.sequence import Sequence
from tests.engine.fake_stores import OneOfTwo
from tests.engine.scheduler_rig import PATIENCE, Rig, check_answer, sequence


def test_nobody_sits_on_pages_while_another_engine_has_all_the_others() -> None:
    """A parked one that cannot go on gives its pages up: the other engine may be waiting for just these."""
    pages = LocalPages(8)
    hog, rig = OneOfTwo(pages), Rig.make(store=OneOfTwo(pages), max_rows=1, device=20)
    low, high = sequence(9, 20, name="low", priority=1), sequence(5, 3, name="high")
    rig.submit(low)
    rig.step_until(lambda: len(low.generated) == 8)
    rig.submit(high)
    taken = hog.exchange([], pages.free)  # quicker than the one that was just let in
    rig.step()
    assert (low.is_parked, high.device_pages) == (True, [])
    assert len(low.host_pages) == 2, "the next token needs another one"
    rig.abort("high")
    rig.step()
    rig.step()
    assert pages.free == 2
    assert taken is not None
    hog.exchange(taken, 0)
    rig.finish()
    check_answer(rig, low)


def test_pages_that_another_engine_gives_back_are_noticed() -> None:
    """Nobody runs here, so nothing else asks the store."""
    pages = LocalPages(8)
    hog, rig = OneOfTwo(pages), Rig.make(store=OneOfTwo(pages), max_rows=2, device=20)
    taken = hog.exchange([], 7)
    assert taken is not None
    rig.host.match([])
    one = sequence(20, 10, name="one")
    rig.submit(one)
    for _ in range(5):
        rig.step()
    assert one.row is None
    hog.exchange(taken, 0)
    rig.finish()
    check_answer(rig, one)


@st.composite
def neighbours(draw: st.DrawFn) -> tuple[list[Rig], list[tuple[int, Sequence]], random.Random]:
    """Two schedulers on one store, and what each is asked for when."""
    chance = random.Random(draw(st.integers(0, 2**32)))
    pages = LocalPages(draw(st.integers(4, 14)))
    rigs = [
        Rig.make(
            store=OneOfTwo(pages),
            device=draw(st.integers(4, 14)),
            shares=draw(st.booleans()),
            ahead=draw(st.booleans()),
            max_rows=draw(st.integers(1, 3)),
            max_waiting=99,
            max_model_len=120,
        )
        for _ in range(2)
    ]
    rigs[1].runner.host = rigs[0].runner.host  # one arena
    asked = []
    for number in range(draw(st.integers(1, 12))):
        where = chance.randrange(2)
        most = 8 * min(pages.total, rigs[where].device.count, 15)
        prompt = chance.randint(1, most)
        one = sequence(
            prompt,
            chance.randint(0, most - prompt),
            name=str(number // 2),
            choice=number % 2,
            priority=chance.choice([0, 0, 1]),
            seed=number,
            common=chance.choice([0, prompt]),
        )
        asked.append((where, one))
    return rigs, asked, chance


@settings(max_examples=150, deadline=None)
@given(neighbours())
def test_two_engines_on_one_store_both_get_done(
    case: tuple[list[Rig], list[tuple[int, Sequence]], random.Random],
) -> None:
    rigs, asked, chance = case
    for where, one in asked:
        rigs[where].submit(one)
        for _ in range(chance.choice([0, 1, 5])):
            chance.choice(rigs).step()
    for _ in range(PATIENCE):
        if not any(rig.stepper.has_work for rig in rigs):
            break
        chance.choice(rigs).step()
    for where, one in asked:
        check_answer(rigs[where], one)
    for rig in rigs:
        rig.finish()


def test_each_wanting_the_page_that_the_other_parked() -> None:
    """Two engines, each with a row and a parked one, which hold all pages between them."""
    pages = LocalPages(9)
    sizes = {"max_rows": 1, "device": 20, "max_model_len": 60, "max_waiting": 9}
    rigs = [Rig.make(store=OneOfTwo(pages), **sizes) for _ in range(2)]  # type: ignore[arg-type]  # by name
    crowd = []
    for number, rig in enumerate(rigs):
        low = sequence(9, 40, name="low", priority=1, seed=number)
        high = sequence(9, 40, name="high", seed=number)
        rig.submit(low)
        rig.step()
        rig.submit(high)
        rig.step()
        assert low.is_parked
        crowd += [(rig, low), (rig, high)]
    for at in range(PATIENCE):
        rigs[at % 2].step()
    for rig, one in crowd:
        check_answer(rig, one)
        rig.finish()

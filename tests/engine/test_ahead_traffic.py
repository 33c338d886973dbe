"""Random requests and aborts, with steps ahead and without: the same tokens, the same pages, and no waits."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.ahead import Case, measure
from services.decoder.engine.limits import Limits
from services.decoder.engine.sequence import Finish, Sampling, Sequence
from services.decoder.kv.device_pages import DevicePages
from tests.engine.fake_runner import VOCAB
from tests.engine.fake_stores import MoodyPages
from tests.engine.scheduler_rig import Rig, check_answer, sequence

Moments = list[tuple[int, int]]
"""Of each request, the steps after it, and a number that says what happens then."""
MOMENTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 19)), min_size=1, max_size=12)


@st.composite
def servers(draw: st.DrawFn) -> tuple[Limits, int]:
    """Limits, and pages of either kind: few or plenty."""
    block, rows = draw(st.sampled_from([1, 4])), draw(st.integers(1, 5))
    limits = Limits(
        max_rows=rows,
        max_model_len=70,
        max_step_tokens=rows + block + draw(st.integers(0, 20)),
        max_waiting=100,
        block_tokens=block,
        page_tokens=draw(st.sampled_from([4, 8])),
    )
    return limits, draw(st.one_of(st.integers(6, 14), st.just(150)))


def serve(
    server: tuple[Limits, int], seed: int, moments: Moments, *, moody: bool, ahead: bool, late: bool = False
) -> tuple[Rig, list[Sequence]]:
    """The same requests and aborts; how far they are at an abort depends on the steps."""
    limits, pages = server
    chance = random.Random(seed)
    store = MoodyPages(pages, random.Random(seed) if moody else None)
    comes = random.Random(seed) if late else None
    rig = Rig(limits, store, DevicePages(pages), ahead, shares=True, late=comes)
    most = min(limits.max_model_len, pages * limits.page_tokens)
    asked = []
    for number, (pause, then) in enumerate(moments):
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
        )
        one.sampling = Sampling(logprobs=chance.random() < 0.1, prompt_logprobs=chance.random() < 0.05)
        asked.append(one)
        rig.submit(one)
        for _ in range(pause):
            rig.step()
        if then < 3:
            rig.abort(str(chance.randrange(number + 1) // 2))
        elif then == 3 and not moody:
            rig.scheduler.seal_now()
    rig.finish()
    return rig, asked


def found(rig: Rig) -> dict[bytes, list[int]]:
    """What a page in the store holds, by its hash."""
    pages, size = rig.runner.host, rig.limits.page_tokens
    return {
        name: [pages[page.page][at] for at in range(size)] for name, page in rig.host.pages.found().items()
    }


@settings(max_examples=200, deadline=None)
@given(
    servers(),
    st.integers(0, 2**32),
    MOMENTS,
    st.booleans(),
)
def test_ahead_or_not_the_tokens_and_pages_are_the_same(
    server: tuple[Limits, int], seed: int, moments: Moments, moody: bool
) -> None:
    plain, asked = serve(server, seed, moments, moody=moody, ahead=False)
    early, again = serve(server, seed, moments, moody=moody, ahead=True)
    for one, other in zip(asked, again, strict=True):
        shorter = min(one.generated, other.generated, key=len)
        assert one.generated[: len(shorter)] == other.generated[: len(shorter)]
        if Finish.ABORT not in (one.finish, other.finish):
            assert (one.generated, one.finish) == (other.generated, other.finish)
            check_answer(early, other)
    mine, others = found(plain), found(early)
    assert all(mine[name] == others[name] for name in mine.keys() & others.keys())
    assert plain.runner.launched.keys() <= {"idle"}


@pytest.mark.parametrize("known", [0, 1984])
def test_the_device_of_a_model_hardly_waits(known: int) -> None:
    """In made-up time, where a call to the store is 200 us."""
    case = Case(streams=6, prompt=2048, known=known, answer=40)
    early, plain = (measure(case, runs_ahead=ahead) for ahead in (True, False))
    assert early.ahead > 0.93
    assert early.idle_us < 0.1 * plain.idle_us
    assert early.late_us < 100, "tokens wait for nobody's launches"
    assert plain.ahead == 0

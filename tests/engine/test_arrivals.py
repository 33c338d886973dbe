"""Pages that were found are loaded beside the steps: who waits for them joins later, the others go on."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.decoder.engine.limits import Limits
from services.decoder.engine.sequence import Finish
from tests.engine.scheduler_rig import check_answer
from tests.engine.test_ahead_traffic import Moments, serve, servers

LIMITS = Limits(
    max_rows=6, max_model_len=240, max_step_tokens=24, max_waiting=50, block_tokens=4, page_tokens=8
)


@settings(max_examples=400, deadline=None)
@given(
    servers(),
    st.integers(0, 2**32),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 19)), min_size=1, max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_any_history(
    server: tuple[Limits, int], seed: int, moments: Moments, moody: bool, early: bool
) -> None:
    rig, asked = serve(server, seed, moments, moody=moody, ahead=early, late=True)
    for one in asked:
        if one.finish is not Finish.ABORT:
            check_answer(rig, one)

"""Found pages that come late: who waits for them reads nothing before they are there, and the others go on.

The stream that loads is made to lag behind the steps, and what lies where the pages will come is made NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling
from services.decoder.engine.sequence import Sequence as Request
from services.decoder.models.causal_lm import CausalLM
from tests.gpu.test_order_gpu import engine_of, model

__all__ = ["model"]  # a fixture

pytestmark = pytest.mark.gpu

LAG_CYCLES = 200_000_000  # about 100 ms
PROMPT = [(7 * i) % 9000 for i in range(640)]


def request(name: str, prompt: Sequence[int], tokens: int) -> Request:
    return Request(name, 0, list(prompt), Sampling(), 7, tokens)


def finish(engine: OfflineEngine, one: Request) -> int:
    """Steps until it has ended; how many it took before its first token."""
    engine.scheduler.submit([one])
    waits = 0
    while not one.finish:
        engine.step()
        waits += not one.generated
        engine.scheduler.check_integrity()
    return waits


def late_load(engine: OfflineEngine) -> Callable[[Sequence[tuple[int, int]]], None]:
    """What loads pages in the engine, after a while in which they hold nothing that could be read."""
    runner, shape = engine.runner, engine.plan.shape
    assert runner.beside is not None
    assert runner.index is not None
    load, index = runner.beside._load, runner.index
    page_blocks = shape.groups * shape.blocks_per_page
    pools = range(shape.layers if engine.plan.settings.kv_mode == "full" else 0)

    def late(pages: Sequence[tuple[int, int]]) -> None:
        for _, page in pages:
            index.pool[:, page] = torch.nan
            for layer in pools:
                runner.residence.pool(layer)[page * page_blocks : (page + 1) * page_blocks] = torch.nan
        torch.cuda._sleep(LAG_CYCLES)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        load(pages)

    return late


@pytest.mark.parametrize("mode", ["tiered", "full"])
def test_a_newcomer_waits_and_nobody_with_it(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    answers = []
    for late in (False, True):
        engine = engine_of(model, mode)
        finish(engine, request("first", PROMPT, 2))
        talks = request("talks", [5, 6, 7], 900)
        engine.scheduler.submit([talks])
        for _ in range(3):
            engine.step()
        if late:
            monkeypatch.setattr(engine.runner.beside, "_load", late_load(engine))
        newcomer = request("newcomer", [*PROMPT, 1, 2, 3], 20)
        waits = finish(engine, newcomer)
        assert newcomer.cached == len(PROMPT)
        assert waits > 20 if late else waits < 10
        assert len(talks.generated) >= waits + len(newcomer.generated)
        answers.append(newcomer.generated)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("mode", ["tiered", "full"])
def test_alone_it_does_not_spin(model: CausalLM, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Where nothing else runs, the step that has nothing to compute waits for the pages."""
    engine = engine_of(model, mode)
    finish(engine, request("first", PROMPT, 2))
    monkeypatch.setattr(engine.runner.beside, "_load", late_load(engine))
    again = request("again", [*PROMPT, 1, 2, 3], 5)
    assert finish(engine, again) < 5
    assert again.cached == len(PROMPT)

"""Where records of models that choose blocks lie changes nothing: `tiered` is `full`, pauses or not."""

from __future__ import annotations

from collections.abc import Sequence as Pages
from pathlib import Path

import pytest
import torch

from services.decoder.engine.sequence import Sequence
from services.decoder.kernels.counter import Counter
from services.decoder.kv.paged_index import PagedIndex
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.spec import ModelSpec
from tests.decoder import checkpoints
from tests.decoder.block_rig import KINDS, engine_of
from tests.decoder.dsa_rig import ask, check, prompt_of
from tests.decoder.recording import Recording
from tests.engine.watch import Watch

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (150, 70, 210, 33, 102, 100, 177, 90)
PROMPT = prompt_of(150)
TOKENS = 50


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(tmp_path_factory.mktemp("blocks"), KINDS[request.param])


@pytest.fixture(scope="module")
def model(path: Path) -> CausalLM:
    return CausalLM(ModelSpec.read(path), torch.float32, torch.device("cpu"))


def check_tiered_is_full(model: CausalLM, batch: int, tokens: int) -> None:
    def asked() -> list[Sequence]:
        return [ask(str(i), prompt_of(length, i), tokens) for i, length in enumerate(LENGTHS[:batch])]

    # Prompts that are soon done, so that all rows decode together and none has another one's slots.
    tiered, ours, recording = engine_of(model, max_rows=batch, max_step_tokens=512), asked(), Recording()
    recording.attach(tiered, ours)
    tiered.generate(ours)
    full, theirs = engine_of(model, kv_mode="full", max_rows=batch, max_step_tokens=512), asked()
    recording.replay(full.runner, theirs)

    assert [one.generated for one in ours] == [one.generated for one in theirs]
    assert len({tuple(one.generated) for one in ours}) == batch
    counters = tiered.counters()[tiered.plan.index_layers].sum(0)
    chosen, hits, misses = (int(counters[at]) for at in (Counter.CHOSEN, Counter.HITS, Counter.MISSES))
    assert hits + misses == chosen == int(full.counters()[full.plan.index_layers][:, Counter.CHOSEN].sum())
    assert misses > 0.2 * chosen, "the hot buffer was too comfortable to prove anything"
    check(tiered)


@pytest.mark.parametrize("batch", [1, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_tiered_equals_full(model: CausalLM, batch: int) -> None:
    check_tiered_is_full(model, batch, 24)


@pytest.mark.slow
def test_tiered_equals_full_in_bf16(path: Path) -> None:
    check_tiered_is_full(CausalLM(ModelSpec.read(path), torch.bfloat16, torch.device("cpu")), 3, 24)


@pytest.mark.parametrize("mode", ["tiered", pytest.param("full", marks=pytest.mark.slow)])
def test_a_found_prefix_gives_the_same_tokens(model: CausalLM, mode: str) -> None:
    """Of a prompt, and of an answer: the index of both comes back with the records."""
    engine = engine_of(model, kv_mode=mode, tight=False)
    first = ask("first", PROMPT, TOKENS)
    engine.generate([first])
    for known in (0, 45):
        again = ask("again", PROMPT, TOKENS)
        again.known = first.generated[:known]
        watch = Watch(engine, again, poison=True)
        engine.generate([again])
        assert again.cached >= 128
        assert watch.loads == 1
        assert again.generated == first.generated
    check(engine)


def parked_and_resumed(model: CausalLM, mode: str, after: int) -> tuple[Sequence, Watch]:
    """A sequence that gave up its only row to another one after some of its tokens."""
    engine = engine_of(model, kv_mode=mode, tight=False, max_rows=1)
    parked, urgent = ask("parked", PROMPT, TOKENS), ask("urgent", PROMPT[::-1], 20, priority=-1)
    watch = Watch(engine, parked, poison=True)
    engine.scheduler.submit([parked])
    while len(parked.generated) < after:
        engine.step()
    engine.generate([urgent])
    assert engine.scheduler.parkings == watch.loads == 1
    check(engine)
    return parked, watch


@pytest.mark.parametrize("mode", ["tiered", pytest.param("full", marks=pytest.mark.slow)])
def test_parked_anywhere_and_resumed(model: CausalLM, mode: str) -> None:
    """Inside an entry, a block and a page, and at their edges: tokens, records and index are undisturbed."""
    engine, alone = engine_of(model, kv_mode=mode, tight=False, max_rows=1), ask("alone", PROMPT, TOKENS)
    watch = Watch(engine, alone)
    engine.generate([alone])
    for after in (2, 43):
        parked, seen = parked_and_resumed(model, mode, after)
        assert parked.generated == alone.generated
        assert all(torch.equal(*pair) for pair in zip(seen.bytes(), watch.bytes(), strict=True))


@pytest.mark.slow
def test_short_of_host_pages_an_answer_is_replayed(model: CausalLM) -> None:
    """Two answers and pages for less: one gives its own back, finds its prompt again and decodes anew."""
    shape = engine_of(model).plan.shape
    planes = sum(plane.page_bytes for plane in shape.planes(with_index=True))
    engine = engine_of(model, 2 * 2**20 + 8 * planes + 1024, tight=False, max_model_len=320)
    assert engine.host.total == 8
    both = [ask(str(i), PROMPT[i:], 120) for i in range(2)]  # five pages each
    engine.generate(both)
    assert engine.scheduler.releases > 0
    check(engine)
    for one in both:
        alone = ask("alone", one.prompt, 120)
        engine_of(model, tight=False, prefix_cache=False).generate([alone])
        assert one.generated == alone.generated


def test_an_index_that_is_not_restored_is_caught(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, alone = engine_of(model, max_rows=1), ask("alone", PROMPT, TOKENS)
    engine.generate([alone])
    load = PagedIndex.load

    def without_some(self: PagedIndex, pages: Pages[tuple[int, int]]) -> None:
        """One page's, in the first layer."""
        load(self, pages)
        for _, device in pages[1:2]:
            self.pool[0, device] = 0

    monkeypatch.setattr(PagedIndex, "load", without_some)
    parked, _ = parked_and_resumed(model, "tiered", 7)
    assert parked.generated != alone.generated

"""Where latent records lie changes nothing: `tiered` is `full`, after a prefix hit and after a pause too."""

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
from tests.decoder.dsa_rig import CASES, ask, check, engine_of, prompt_of
from tests.decoder.recording import Recording
from tests.engine.watch import Watch

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (150, 70, 210, 33, 102, 100, 177, 90)
PROMPT = prompt_of(150)
TOKENS = 50


@pytest.fixture(scope="module", params=["deepseek", "glm shared"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = CASES[request.param]
    return checkpoints.save(tmp_path_factory.mktemp("dsa"), case.model_type, **case.changes)


@pytest.fixture(scope="module")
def model(path: Path) -> CausalLM:
    return CausalLM(ModelSpec.read(path), torch.float32, torch.device("cpu"))


def check_tiered_is_full(model: CausalLM, batch: int, tokens: int) -> None:
    def asked() -> list[Sequence]:
        lengths = enumerate(LENGTHS[:batch])
        return [ask(str(i), prompt_of(length, i), tokens) for i, length in lengths]

    tiered, ours, recording = engine_of(model, max_rows=batch), asked(), Recording()
    recording.attach(tiered, ours)
    tiered.generate(ours)
    full, theirs = engine_of(model, max_rows=batch, kv_mode="full", hot_tokens=0), asked()
    recording.replay(full.runner, theirs)

    assert [one.generated for one in ours] == [one.generated for one in theirs]
    assert len({tuple(one.generated) for one in ours}) == batch
    choosing = [layer for layer in range(tiered.plan.shape.layers) if tiered.plan.shape.chooses(layer)]
    counters = tiered.counters()[choosing]
    chosen, hits, misses = (
        int(counters[:, at].sum()) for at in (Counter.CHOSEN, Counter.HITS, Counter.MISSES)
    )
    assert hits + misses == chosen == int(full.counters()[:, Counter.CHOSEN].sum())
    assert misses > 0.2 * chosen, "the hot buffer was too comfortable to prove anything"
    check(tiered)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_tiered_equals_full(model: CausalLM, batch: int) -> None:
    check_tiered_is_full(model, batch, 24)


def test_tiered_equals_full_in_bf16(path: Path) -> None:
    spec = ModelSpec.read(path)
    check_tiered_is_full(CausalLM(spec, torch.bfloat16, torch.device("cpu")), 3, 24)


def test_index_keys_in_eight_bits_come_back_too(model: CausalLM) -> None:
    """`tiered` is `full`, and what is loaded with a found prefix is what was there."""
    coded: dict[str, object] = {"index_dtype": "float8", "hot_tokens": 0, "max_rows": 1}
    answers: dict[str, list[list[int]]] = {}
    for mode in ("full", "tiered"):
        engine = engine_of(model, kv_mode=mode, **coded)
        answers[mode] = []
        for name in ("first", "again"):
            one = ask(name, PROMPT, TOKENS)
            watch = Watch(engine, one, poison=True)
            engine.generate([one])
            assert watch.loads == (name == "again")
            answers[mode].append(one.generated)
        keys = len(engine.plan.index_layers) * engine.plan.device_pages * 64
        assert engine.plan.index_bytes == keys * (32 + 16)
        check(engine)
    assert answers["full"] == answers["tiered"]
    assert answers["full"][0] == answers["full"][1]


@pytest.mark.parametrize("mode", ["tiered", "full"])
def test_a_found_prefix_gives_the_same_tokens(model: CausalLM, mode: str) -> None:
    """Of a prompt, and of an answer: index keys of both come back with the records."""
    engine = engine_of(model, kv_mode=mode, hot_tokens=0)
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
    engine = engine_of(model, kv_mode=mode, hot_tokens=0, max_rows=1)
    parked, urgent = ask("parked", PROMPT, TOKENS), ask("urgent", PROMPT[::-1], 20, priority=-1)
    watch = Watch(engine, parked, poison=True)
    engine.scheduler.submit([parked])
    while len(parked.generated) < after:
        engine.step()
    engine.generate([urgent])
    assert engine.scheduler.parkings == watch.loads == 1
    assert watch.computed == len(PROMPT) + TOKENS - 1, "something was computed twice"
    check(engine)
    return parked, watch


@pytest.mark.parametrize("mode", ["tiered", "full"])
def test_parked_anywhere_and_resumed(model: CausalLM, mode: str) -> None:
    """Inside a page and at its edge: tokens, records and index keys of a run that nobody disturbed."""
    engine, alone = engine_of(model, kv_mode=mode, hot_tokens=0, max_rows=1), ask("alone", PROMPT, TOKENS)
    watch = Watch(engine, alone)
    engine.generate([alone])
    for after in (1, 7, 43, 44):
        parked, seen = parked_and_resumed(model, mode, after)
        assert parked.generated == alone.generated
        assert all(torch.equal(*pair) for pair in zip(seen.bytes(), watch.bytes(), strict=True))


@pytest.mark.parametrize("mode", ["tiered", "full"])
def test_short_of_host_pages_an_answer_is_replayed(model: CausalLM, mode: str) -> None:
    """Two answers and pages for less: one gives its own back, finds its prompt again and decodes anew."""
    shape = engine_of(model).plan.shape
    planes = sum(plane.page_bytes for plane in shape.planes(with_index=True))
    engine = engine_of(model, 2 * 2**20 + 8 * planes + 1024, kv_mode=mode, hot_tokens=0, max_model_len=320)
    assert engine.host.total == 8
    both = [ask(str(i), PROMPT[i:], 120) for i in range(2)]  # five pages each
    engine.generate(both)
    assert engine.scheduler.releases > 0
    check(engine)
    for one in both:
        alone = ask("alone", one.prompt, 120)
        engine_of(model, kv_mode=mode, hot_tokens=0, prefix_cache=False).generate([alone])
        assert one.generated == alone.generated


def test_index_keys_that_are_not_restored_are_caught(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
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

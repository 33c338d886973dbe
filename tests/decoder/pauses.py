"""What must hold of answers wherever KV lies, and through pauses: of models that choose by themselves.

Knows engines and sequences; which models and devices they are of is the tests' affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Pages

import pytest
import torch

from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sequence
from services.decoder.kernels.counter import Counter
from services.decoder.kv.paged_index import PagedIndex
from tests.decoder.dsa_rig import ask, check, prompt_of
from tests.decoder.recording import Recording
from tests.engine.watch import Watch

LENGTHS = (150, 70, 210, 33, 102, 100, 177, 90)
PROMPT = prompt_of(150)
TOKENS = 50


def check_tiered_is_full(tiered: OfflineEngine, full: OfflineEngine, tokens: int) -> None:
    """As many prompts as `tiered` has rows, at once; `full` goes through the same steps."""
    batch = tiered.plan.settings.max_rows

    def asked() -> list[Sequence]:
        return [ask(str(i), prompt_of(length, i), tokens) for i, length in enumerate(LENGTHS[:batch])]

    ours, theirs, recording = asked(), asked(), Recording()
    recording.attach(tiered, ours)
    tiered.generate(ours)
    recording.replay(full.runner, theirs)

    assert [one.generated for one in ours] == [one.generated for one in theirs]
    assert len({tuple(one.generated) for one in ours}) == batch
    counters = tiered.counters()[tiered.plan.index_layers].sum(0)
    chosen, hits, misses = (int(counters[at]) for at in (Counter.CHOSEN, Counter.HITS, Counter.MISSES))
    assert hits + misses == chosen == int(full.counters()[full.plan.index_layers][:, Counter.CHOSEN].sum())
    assert misses > 0.2 * chosen, "the hot buffer was too comfortable to prove anything"
    check(tiered)


def check_shared_prefix(engine: OfflineEngine) -> None:
    """Three rows that begin alike have one set of device pages for it, also when who loaded it is gone."""
    size = engine.plan.settings.page_tokens
    prompts = [PROMPT[: 2 * size] + prompt_of(20, seed) for seed in (11, 12, 13)]
    alone = [ask(f"alone {number}", prompt, TOKENS) for number, prompt in enumerate(prompts)]
    for one in alone:
        engine.generate([one])
    assert engine.device_pages.free == engine.device_pages.count
    together = [ask(str(number), prompt, TOKENS) for number, prompt in enumerate(prompts)]
    for one in together:
        engine.scheduler.submit([one])
    while not all(one.generated for one in together):
        engine.step()
    first, *others = (one.device_pages for one in together)
    assert all(pages[:2] == first[:2] for pages in others)
    assert len({page for pages in (first, *others) for page in pages}) == 2 + 3
    engine.scheduler.abort("0", set())
    engine.generate([])
    assert [one.generated for one in together[1:]] == [one.generated for one in alone[1:]]
    check(engine)


def check_found_prefix(engine: OfflineEngine) -> None:
    """Of a prompt, and of an answer: the index of both comes back with the records."""
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


def parked_and_resumed(engine: OfflineEngine, after: int, *, ahead: bool) -> tuple[Sequence, Watch]:
    """A sequence that gave up the only row of `engine` to another one after some of its tokens.

    A device that is `ahead` of the scheduler may compute what is not needed then.
    """
    parked, urgent = ask("parked", PROMPT, TOKENS), ask("urgent", PROMPT[::-1], 20, priority=-1)
    watch = Watch(engine, parked, poison=True)
    engine.scheduler.submit([parked])
    while len(parked.generated) < after:
        engine.step()
    engine.generate([urgent])
    assert engine.scheduler.parkings == watch.loads == 1
    assert ahead or watch.computed == len(PROMPT) + TOKENS - 1, "something was computed twice"
    check(engine)
    return parked, watch


def check_parked_anywhere(
    make: Callable[[], OfflineEngine], after: Iterable[int], *, ahead: bool = False
) -> None:
    """Tokens, records and index are those of a run that nobody disturbed; each engine has one row."""
    engine, alone = make(), ask("alone", PROMPT, TOKENS)
    watch = Watch(engine, alone)
    engine.generate([alone])
    for tokens in after:
        parked, seen = parked_and_resumed(make(), tokens, ahead=ahead)
        assert parked.generated == alone.generated, tokens
        assert all(torch.equal(*pair) for pair in zip(seen.bytes(), watch.bytes(), strict=True))


def check_replayed(make: Callable[..., OfflineEngine]) -> None:
    """Two answers and pages for less: one gives its own back, finds its prompt again and decodes anew.

    `make` takes the arena's bytes, by default room for all, and settings.
    """
    shape = make().plan.shape
    planes = sum(plane.page_bytes for plane in shape.planes(with_index=True))
    engine = make(2 * 2**20 + 8 * planes + 1024, max_model_len=320)
    assert engine.host.total == 8
    both = [ask(str(i), PROMPT[i:], 120) for i in range(2)]  # five pages each
    engine.generate(both)
    assert engine.scheduler.releases > 0
    check(engine)
    for one in both:
        alone = ask("alone", one.prompt, 120)
        make(prefix_cache=False).generate([alone])
        assert one.generated == alone.generated


def check_loss_is_caught(make: Callable[[], OfflineEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that is not restored would show: without a page of the first layer, other tokens come."""
    engine, alone = make(), ask("alone", PROMPT, TOKENS)
    engine.generate([alone])
    load = PagedIndex.load

    def without_some(self: PagedIndex, pages: Pages[tuple[int, int]]) -> None:
        load(self, pages)
        for _, device in pages[1:2]:
            self.pool[0, device] = 0

    monkeypatch.setattr(PagedIndex, "load", without_some)
    parked, _ = parked_and_resumed(make(), 7, ahead=False)
    assert parked.generated != alone.generated

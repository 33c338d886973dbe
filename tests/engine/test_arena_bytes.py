"""The default model in an engine process: requests side by side, and their KV bytes in the arena's file."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hotset.v1 import engine_pb2 as pb
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from benchmarks.real_text import real_tokens
from services.contract.layout import ArenaLayout
from services.contract.page_header import PAGE_HEADER, PageState
from services.decoder.engine.memory_plan import kv_planes, kv_shape
from services.decoder.kv.shape import KvShape
from services.decoder.models.spec import ModelSpec
from services.decoder.settings import DecoderSettings
from tests.engine.processes import Engine, Keeper, KvStore, eventually

Floats = npt.NDArray[np.float32]
ARENA_BYTES = 256 * 2**20
FLAGS: dict[str, object] = {
    "dtype": "float32",
    "budget_tokens": 64,
    "hot_tokens": 80,
    "max_rows": 4,
    "threads": 1,
}


class Served:
    """The engine, its store, and where everything lies in the arena."""

    def __init__(self, directory: Path, keep: Keeper, model: Path) -> None:
        self.model = model
        settings = DecoderSettings.model_validate({"model": model, **FLAGS})
        self.spec = ModelSpec.read(model)
        self.shape: KvShape = kv_shape(settings, self.spec, torch.float32)
        self.layout = ArenaLayout.fit(ARENA_BYTES, self.shape.page_tokens, kv_planes(settings, self.shape))
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.store = keep(KvStore(directory / "arena", ARENA_BYTES))
        self.engine = keep(Engine(directory / "e.sock", model, self.store.address, **FLAGS))
        self.described = self.engine.wait_ready()

    def prompt(self, length: int, skip: int) -> list[int]:
        return real_tokens(self.tokenizer, length, skip)

    def pages(self, *states: PageState) -> list[int]:
        """Those in one of `states`, by the headers in the file."""
        count = self.layout.page_count
        headers = np.fromfile(self.store.arena, PAGE_HEADER, count, offset=self.layout.page_headers_offset)
        return [int(page) for page in np.flatnonzero(np.isin(headers["state"], states))]

    def open_pages(self) -> list[int]:
        """Pages that a session writes."""
        return self.pages(PageState.OPEN)

    def stored(self, layer: int) -> Floats:
        """[pages, page_tokens, kv_heads, key and value, head_dim] of one layer, read from the file."""
        shape = self.shape
        raw = np.fromfile(
            self.store.arena,
            np.float32,
            self.layout.page_count * shape.groups * shape.page_tokens * shape.record_elements,
            offset=self.layout.layer_offset("kv", layer),
        ).reshape(self.layout.page_count, shape.groups, shape.page_tokens, 2, shape.heads, shape.head_dim)
        by_head = raw.transpose(0, 2, 1, 4, 3, 5)  # [pages, tokens, groups, heads of a group, 2, head_dim]
        return by_head.reshape(self.layout.page_count, shape.page_tokens, shape.kv_heads, 2, shape.head_dim)


@pytest.fixture(scope="module")
def served(module_shm: Path, module_keep: Keeper, default_model: Path) -> Served:
    return Served(module_shm, module_keep, default_model)


def test_it_describes_itself(served: Served) -> None:
    told = served.described
    assert (told.vocab_size, list(told.eos_token_ids)) == (49152, [2])
    assert told.max_model_len_tokens == min(8192, served.layout.page_count * 64)
    assert (told.kv_mode, told.dtype, told.device) == ("tiered", "float32", "cpu")
    assert (told.max_rows, told.max_waiting) == (4, 256)


def key_value_pairs(cache: DynamicCache, layer: int) -> Floats:
    """[tokens, kv_heads, key and value, head_dim], as transformers keeps them of one sequence."""
    kept = cache.layers[layer]
    assert isinstance(kept, DynamicLayer)
    assert kept.keys is not None
    assert kept.values is not None
    return torch.stack([kept.keys[0], kept.values[0]], 2).transpose(0, 1).numpy()


def test_two_requests_keep_their_kv_in_the_arenas_file(served: Served) -> None:
    """While both run, keys and values of every token of both prompts are in the file, as transformers
    computes them; pages of the two are told apart by their bytes alone.
    """
    engine = served.engine
    prompts = {"one": served.prompt(150, 0), "other": served.prompt(70, 5000)}
    for name, prompt in prompts.items():
        engine.submit(name, prompt, 200)
    eventually("both answer", lambda: all(len(engine.tokens(name)) > 2 for name in prompts))
    pages = served.pages(PageState.OPEN, PageState.SEALED)
    now = served.store.stats()
    assert now.open_pages + now.sealed_pages >= len(pages) >= 3 + 2
    layers = [served.stored(layer) for layer in range(served.shape.layers)]
    assert not any(engine.finished(name) for name in prompts), "it was to run while the file was read"
    stats = engine.stats()
    assert stats.requests_running == 2
    assert stats.host_pages_held >= len(pages)
    engine.stub.Abort(pb.AbortRequest(request_id="one"))
    engine.stub.Abort(pb.AbortRequest(request_id="other"))

    reference = AutoModelForCausalLM.from_pretrained(served.model, dtype=torch.float32)
    owned: list[int] = []
    for prompt in prompts.values():
        with torch.inference_mode():
            output = reference(torch.tensor([prompt]), use_cache=True)
        [cache] = [part for part in output.values() if isinstance(part, DynamicCache)]
        expected = [key_value_pairs(cache, layer) for layer in range(served.shape.layers)]
        mine = []
        for start in range(0, len(prompt), 64):
            filled = min(64, len(prompt) - start)
            run = expected[0][start : start + filled]
            homes = [page for page in pages if np.allclose(layers[0][page, :filled], run, atol=1e-4)]
            assert len(homes) == 1, "a page of the prompt is not in the arena, or twice"
            mine += homes
        for layer, stored in enumerate(layers):
            found = stored[mine].reshape(-1, *stored.shape[2:])[: len(prompt)]
            assert np.allclose(found, expected[layer], atol=1e-4), f"layer {layer}"
        owned += mine
    assert len(set(owned)) == len(owned)
    eventually("everything is back", lambda: engine.idle() and not served.open_pages())


def test_two_choices_draw_from_their_own_seeds_and_end(served: Served) -> None:
    engine, prompt = served.engine, served.prompt(20, 900)
    wish = pb.SamplingParams(temperature=1.0, logprobs=True, top_logprobs=2)

    def ask(name: str, seeds: tuple[int, ...]) -> list[list[int]]:
        choices = [pb.Choice(index=i, seed=seed) for i, seed in enumerate(seeds)]
        engine.submit(name, prompt, 6, choices=choices, sampling=wish)
        return [engine.answer(name, i) for i in range(len(seeds))]

    first = ask("pair", (5, 6))
    assert first[0] != first[1]
    assert ask("again", (6, 5)) == [first[1], first[0]]
    assert ask("alone", (6,)) == [first[1]]
    for event in engine.events["pair", 1]:
        for token in event.tokens:
            assert token.HasField("logprob")
            assert [top.logprob for top in token.top] == sorted((t.logprob for t in token.top), reverse=True)
    eventually("everything is back", engine.idle)


def test_prompt_log_probabilities_come_with_the_first_event(served: Served) -> None:
    prompt = served.prompt(90, 3000)
    served.engine.submit("echo", prompt, 0, sampling=pb.SamplingParams(prompt_logprobs=True))
    assert served.engine.answer("echo") == []
    [event] = served.engine.events["echo", 0]
    assert [token.id for token in event.prompt] == prompt
    assert not event.prompt[0].HasField("logprob")
    assert all(token.logprob < 0 for token in event.prompt[1:])
    assert event.finish_reason == pb.FINISH_REASON_LENGTH


def test_a_stop_token_ends_and_is_told_last(served: Served) -> None:
    engine, prompt = served.engine, served.prompt(40, 100)
    engine.submit("free", prompt, 8)
    free = engine.answer("free")
    engine.submit("stopped", prompt, 8, stop_token_ids=[free[3]])
    stopped = engine.answer("stopped")
    assert stopped == free[: free.index(free[3]) + 1]
    last = engine.finished("stopped")
    assert last is not None
    assert last.finish_reason == pb.FINISH_REASON_STOP


def test_aborting_gives_pages_back_and_leaves_the_neighbour_alone(served: Served) -> None:
    """In mid-answer, in mid-prefill, while queued, twice, and by a name nobody knows."""
    engine, prompt = served.engine, served.prompt(100, 100)
    engine.submit("undisturbed", prompt, 20)
    right = engine.answer("undisturbed")
    engine.submit("neighbour", prompt, 20)
    names = ["decoding", *(f"crowd {i}" for i in range(6))]
    engine.submit("decoding", served.prompt(30, 50), 500)
    eventually("it answers", lambda: engine.tokens("decoding"))
    for i, name in enumerate(names[1:]):
        engine.submit(name, served.prompt(600, 1000 * i), 500)
    assert engine.stats().requests_waiting > 0
    for name in (*names, "unknown", names[0]):
        engine.stub.Abort(pb.AbortRequest(request_id=name))
    for name in names:
        engine.answer(name)
        last = engine.finished(name)
        assert last is not None
        assert last.finish_reason == pb.FINISH_REASON_ABORT
        assert len(engine.tokens(name)) < 500
    assert engine.answer("neighbour") == right
    eventually("everything is back", lambda: engine.idle() and not served.open_pages())
    told = {name: len(engine.events[name, 0]) for name in names}
    time.sleep(0.2)
    assert told == {name: len(engine.events[name, 0]) for name in names}, "something came after the end"


def test_one_choice_of_two_can_be_aborted(served: Served) -> None:
    engine, prompt = served.engine, served.prompt(30, 700)
    choices = [pb.Choice(index=3, seed=1), pb.Choice(index=8, seed=1)]
    engine.submit("siblings", prompt, 10, choices=choices)
    engine.stub.Abort(pb.AbortRequest(request_id="siblings", choices=[8, 99]))
    assert len(engine.answer("siblings", 3)) == 10
    engine.answer("siblings", 8)
    last = engine.finished("siblings", 8)
    assert last is not None
    assert last.finish_reason == pb.FINISH_REASON_ABORT


def test_the_figures_add_up(served: Served) -> None:
    engine = served.engine
    eventually("idle", engine.idle)
    before = engine.stats()
    engine.submit("counted", served.prompt(300, 2000), 25)
    engine.answer("counted")
    eventually("idle", engine.idle)
    after = engine.stats()
    assert after.prompt_tokens - before.prompt_tokens == 300
    assert after.generation_tokens - before.generation_tokens == 25
    assert after.steps - before.steps == 1 + 24
    assert after.step_ns > before.step_ns
    assert len(after.layers) == 30
    assert (after.rows_total, after.device_pages_total) == (4, 4 * served.layout.page_count)
    assert after.hot_slots_total == 4 * 3 * 5 * 30
    block_bytes = served.shape.block_bytes
    for old, new in zip(before.layers, after.layers, strict=True):
        chosen = new.chosen_blocks - old.chosen_blocks
        assert chosen == 24 * 3 * 4, "24 steps, 3 groups, 4 of some 20 blocks"
        assert new.hits - old.hits + new.misses - old.misses == chosen
        assert new.fetched_bytes - old.fetched_bytes == (new.misses - old.misses) * block_bytes
        assert new.misses > old.misses
        assert new.resolve_ns > old.resolve_ns

"""Models that choose by an indexer of their own answer as transformers does, and choose what it chooses."""

from __future__ import annotations

from inspect import signature
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from services.decoder.attention.selector import TokenSelector
from services.decoder.kernels.choose_tokens import IndexQuery
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.rope import turn_halves
from services.decoder.kv.batch import PrefillChunk
from services.decoder.models import latent_attention
from tests.decoder import checkpoints
from tests.decoder.dsa_rig import ARENA_BYTES, CASES, TOP_K, ask, check, engine_of, prompt_of

pytestmark = pytest.mark.usefixtures("one_thread")

Choices = dict[tuple[int, int], set[int]]
"""(layer, position) -> the tokens chosen for it."""


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = CASES[request.param]
    return checkpoints.save(tmp_path_factory.mktemp("dsa"), case.model_type, **case.changes)


def ours(path: Path, prompts: list[list[int]], tokens: int, **changes: object) -> list[list[int]]:
    engine = engine_of(path, **changes)
    sequences = [ask(str(i), prompt, tokens) for i, prompt in enumerate(prompts)]
    engine.generate(sequences)
    check(engine)
    return [sequence.generated for sequence in sequences]


def theirs(path: Path, prompt: list[int], tokens: int) -> tuple[list[int], Choices]:
    """transformers' greedy answer with its own cache, and what its indexers chose."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    choices: Choices = {}
    at = 0

    def note(layer: int, module: nn.Module, inputs: object, chosen: Tensor) -> None:
        for i, row in enumerate(chosen[0].tolist()):
            choices[layer, at + i] = {token for token in row if token <= at + i}

    for layer, block in enumerate(model.model.layers):
        indexer = block.self_attn.indexer
        if indexer is not None:
            indexer.register_forward_hook(lambda *call, layer=layer: note(layer, *call))
    answer: list[int] = []
    cache, fed = None, prompt
    # The name that it had before transformers 5.24.
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    with torch.inference_mode():
        while len(answer) < tokens:
            out = model(torch.tensor([fed]), use_cache=True, **{name: cache})
            cache = out[name]
            at += len(fed)
            fed = [int(out.logits[0, -1].argmax())]
            answer += fed
    return answer, choices


class Noting:
    """Before a layer's own selector: notes what it chooses for row 0."""

    def __init__(self, layer: int, own: TokenSelector, choices: Choices) -> None:
        self.layer, self.own, self.choices = layer, own, choices

    def fill(self, chunk: PrefillChunk, key: Tensor) -> None:
        self.own.fill(chunk, key)

    def observe(self, batch: DecodeBatch, key: Tensor) -> None:
        self.own.observe(batch, key)

    def select(self, batch: DecodeBatch, index: IndexQuery) -> Tensor:
        return self.note(int(batch.position[0]), self.own.select(batch, index))

    def rank(self, chunk: PrefillChunk, index: IndexQuery) -> Tensor:
        return self.note(chunk.start, self.own.rank(chunk, index))

    def note(self, start: int, chosen: Tensor) -> Tensor:
        for i, row in enumerate(chosen.tolist()):
            self.choices[self.layer, start + i] = {token for token in row if token >= 0}
        return chosen


def alone(path: Path, prompt: list[int], tokens: int, mode: str) -> tuple[list[int], Choices]:
    """Our answer, and what our layers that choose chose."""
    choices: Choices = {}
    hot_tokens = 0 if mode == "full" else TOP_K + 1
    engine = engine_of(
        path,
        ARENA_BYTES,
        lambda layer, own: Noting(layer, own, choices),
        kv_mode=mode,
        hot_tokens=hot_tokens,
        max_rows=1,
    )
    engine.generate([one := ask("one", prompt, tokens)])
    check(engine)
    return one.generated, choices


@pytest.mark.parametrize("mode", ["full", "tiered"])
def test_tokens_and_choices_are_transformers(checkpoint: Path, mode: str) -> None:
    """Chunks over windows of history, then decode far past the budget: every layer and position."""
    prompt = prompt_of(150)
    answer, own = alone(checkpoint, prompt, 64, mode)
    expected, chosen = theirs(checkpoint, prompt, 64)
    assert answer == expected
    assert len(set(answer)) > 8, "an answer that says one thing proves nothing"
    assert own.keys() == chosen.keys(), "layers that follow choose nothing"
    for (layer, position), tokens in chosen.items():
        assert own[layer, position] == tokens, (layer, position)
        assert len(tokens) == min(TOP_K, position + 1)


def test_rows_of_any_length_together(checkpoint: Path) -> None:
    prompts = [prompt_of(length, seed) for seed, length in enumerate((70, 5, 33))]
    assert ours(checkpoint, prompts, 20) == [theirs(checkpoint, prompt, 20)[0] for prompt in prompts]


def test_rope_by_halves_in_glms_indexer_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(latent_attention.INDEXER_ROPE, "glm_moe_dsa", turn_halves)
    path = checkpoints.save(tmp_path, "glm_moe_dsa")
    prompt = prompt_of(150)
    answer, own = alone(path, prompt, 64, "full")
    expected, chosen = theirs(path, prompt, 64)
    assert any(own[place] != tokens for place, tokens in chosen.items())
    assert answer != expected

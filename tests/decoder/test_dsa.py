"""Models that choose by an indexer of their own answer as transformers does, and choose what it chooses."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from services.decoder.attention.latent_heart import LatentHeart
from services.decoder.kernels.rope import turn_halves
from services.decoder.models import latent_attention
from tests.decoder import checkpoints
from tests.decoder.dsa_rig import CASES, TOP_K, ask, check, engine_of, prompt_of

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
    with torch.inference_mode():
        while len(answer) < tokens:
            out = model(torch.tensor([fed]), cache=cache, use_cache=True)
            cache = out.cache
            at += len(fed)
            fed = [int(out.logits[0, -1].argmax())]
            answer += fed
    return answer, choices


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[Choices]:
    """What our layers choose, by row."""
    found: list[Choices] = [defaultdict(set) for _ in range(3)]
    decode, prefill = LatentHeart.decode, LatentHeart.prefill

    def note(row: int, layer: int, position: int, chosen: list[int]) -> None:
        found[row][layer, position] = {token for token in chosen if token >= 0}

    def noted_decode(self, layer, batch, *rest):  # type: ignore[no-untyped-def]  # a spy passes on what it gets
        out, chosen = decode(self, layer, batch, *rest)
        for row, at, own in zip(
            batch.seats.tolist(), batch.position.tolist(), chosen.selected.tolist(), strict=True
        ):
            note(row, layer, at, own)
        return out, chosen

    def noted_prefill(self, layer, chunk, *rest):  # type: ignore[no-untyped-def]  # likewise
        out, chosen = prefill(self, layer, chunk, *rest)
        for i, own in enumerate(chosen.tolist()):
            note(chunk.row, layer, chunk.start + i, own)
        return out, chosen

    monkeypatch.setattr(LatentHeart, "decode", noted_decode)
    monkeypatch.setattr(LatentHeart, "prefill", noted_prefill)
    return found


@pytest.mark.parametrize("mode", ["full", "tiered"])
def test_tokens_and_choices_are_transformers(checkpoint: Path, choices: list[Choices], mode: str) -> None:
    """Chunks over windows of history, then decode far past the budget: every layer and position."""
    prompt = prompt_of(150)
    [answer] = ours(checkpoint, [prompt], 64, kv_mode=mode, hot_tokens=0 if mode == "full" else TOP_K + 1)
    expected, chosen = theirs(checkpoint, prompt, 64)
    assert answer == expected
    assert len(set(answer)) > 8, "an answer that says one thing proves nothing"
    for (layer, position), tokens in chosen.items():
        assert choices[0][layer, position] == tokens, (layer, position)
        assert len(tokens) == min(TOP_K, position + 1)


def test_rows_of_any_length_together(checkpoint: Path) -> None:
    prompts = [prompt_of(length, seed) for seed, length in enumerate((70, 5, 33))]
    assert ours(checkpoint, prompts, 20) == [theirs(checkpoint, prompt, 20)[0] for prompt in prompts]


def test_rope_by_halves_in_glms_indexer_is_caught(
    tmp_path: Path, choices: list[Choices], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(latent_attention.INDEXER_ROPE, "glm_moe_dsa", turn_halves)
    path = checkpoints.save(tmp_path, "glm_moe_dsa")
    prompt = prompt_of(150)
    [answer] = ours(path, [prompt], 64)
    expected, chosen = theirs(path, prompt, 64)
    assert any(choices[0][place] != tokens for place, tokens in chosen.items())
    assert answer != expected

"""Small engines around tiny models that choose blocks by themselves, and what such models should answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

from services.decoder.engine.offline import OfflineEngine
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.spec import ModelSpec
from services.decoder.settings import DecoderSettings
from tests.decoder import plain_nsa
from tests.decoder.plain_nsa import Choices

ARENA_BYTES = 16 * 2**20


def engine_of(
    model: CausalLM | Path, arena_bytes: int = ARENA_BYTES, /, *, tight: bool = True, **changes: object
) -> OfflineEngine:
    """Of a loaded model, or of a checkpoint in fp32; `tight`: as few hot slots as there can be."""
    spec = ModelSpec.read(model) if isinstance(model, Path) else model.spec
    assert spec.blocks is not None
    base: dict[str, object] = {
        "model": spec.path,
        "device": "cpu",
        "dtype": "float32",
        "max_rows": 3,
        "max_step_tokens": 48,
        "window_tokens": 64,
    }
    if tight and changes.get("kv_mode") != "full":
        size, budget = spec.blocks.block_tokens, spec.blocks.read_blocks * spec.blocks.block_tokens
        base |= {"block_tokens": size, "budget_tokens": budget, "hot_tokens": budget + size}
    settings = DecoderSettings.model_validate(base | changes)
    return OfflineEngine(settings, arena_bytes, None if isinstance(model, Path) else model)


@contextmanager
def noting_indexers(length: int) -> Iterator[Choices]:
    """While it lasts, transformers' MiniMax-M3 notes what its indexers choose."""
    noted: Choices = {}
    forward = MiniMaxM3VLIndexer.forward

    def note(self: MiniMaxM3VLIndexer, *args: object, **more: object) -> torch.Tensor:
        found: torch.Tensor = forward(self, *args, **more)
        for head, rows in enumerate(found[0].tolist()):
            for at, row in enumerate(rows):
                noted[self.layer_idx, at, head] = {block for block in row if block >= 0}
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MiniMaxM3VLIndexer, "forward", note)
        yield noted


def oracle(path: Path, ids: list[int]) -> tuple[torch.Tensor, Choices]:
    """[T, vocab] logits over a whole sequence, and what was chosen, without anything of hotset's."""
    if ModelSpec.read(path).config.model_type == "nsa":
        return plain_nsa.scores_of(path, ids)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with noting_indexers(len(ids)) as noted, torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0], noted


KINDS: Mapping[str, str] = {"nsa": "nsa", "m3": "minimax_m3_vl_text"}

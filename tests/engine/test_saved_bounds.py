"""A full block's bounds lie in the arena beside its records, whether prefill or decode filled it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.engine.step_plan import StepPlan
from services.decoder.kv.bounds_index import BoundsIndex
from services.decoder.settings import DecoderSettings
from tests.decoder import checkpoints


@pytest.mark.parametrize("sharing", ["kv_head", "layer"])
def test_the_index_plane_is_the_bounds_of_the_kv_plane(tmp_path: Path, sharing: str) -> None:
    """Chunks of 48 and 16 tokens through pages of 64, then 60 decoded; the open page has one full block."""
    settings = DecoderSettings.model_validate(
        {
            "model": checkpoints.save(tmp_path, "llama"),
            "dtype": "float32",
            "quest_sharing": sharing,
            "dense_layers": 1,
            "budget_tokens": 32,
            "max_step_tokens": 48,
        }
    )
    engine = OfflineEngine(settings, 8 * 2**20)
    shape, index = engine.plan.shape, engine.runner.index
    assert isinstance(index, BoundsIndex)
    sequence = Sequence("r", 0, [3 + 7 * i % 200 for i in range(150)], Sampling(), seed=0, max_tokens=60)
    pages: list[int] = []

    def note(plan: StepPlan) -> None:
        if sequence.host_pages:
            pages[:] = [page.page for page in sequence.host_pages]

    engine.on_plan = note
    engine.generate([sequence])
    computed = 150 + 60 - 1
    assert len(pages) == 4
    for layer in (1, 2):
        records = engine.arena.kv_blocks(layer).view(
            -1, shape.groups, shape.blocks_per_page, shape.block_tokens, 2, shape.heads, shape.head_dim
        )
        saved = engine.arena.index(layer).view(-1, shape.blocks_per_page, shape.kv_heads, 2, shape.head_dim)
        for page in pages[: computed // 64]:
            keys = (
                records[page, :, :, :, 0].permute(1, 2, 0, 3, 4).flatten(2, 3)
            )  # [blocks, tokens, heads, dim]
            assert torch.equal(saved[page, :, :, 0], keys.amax(1))
            assert torch.equal(saved[page, :, :, 1], (-keys).amax(1))
        opened = records[pages[3], :, :1, :, 0].permute(1, 2, 0, 3, 4).flatten(2, 3)  # its one full block
        assert torch.equal(saved[pages[3], :1, :, 0], opened.amax(1))
        assert not saved[pages[3], 1:].any()
    assert not engine.arena.index(0).any(), "a dense layer has no bounds"

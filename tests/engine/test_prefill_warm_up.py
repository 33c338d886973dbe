"""What is warmed up before the first prompt is what a prompt launches; here with the twins."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.prefill_warm_up import warm_up_block_prefill, warm_up_latent_prefill
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.kernels.attend_part import Part
from services.decoder.kernels.block_twins import BlockTwins
from services.decoder.kernels.choose_tokens import IndexQuery
from services.decoder.kernels.gpu.attend import AttendShape
from services.decoder.kernels.gpu.card import Card
from services.decoder.kernels.latent_twins import LatentTwins
from services.decoder.kernels.twins import Twins
from services.decoder.settings import DecoderSettings
from tests.decoder import checkpoints
from tests.decoder.block_rig import KINDS, engine_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("index_dtype", ["auto", "float8"])
def test_an_indexers_scores_are_warmed_up_as_its_keys_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index_dtype: str
) -> None:
    """A variant is compiled by what these are: dtypes, and the numbers of a key and of a query."""
    asked: list[tuple[object, ...]] = []
    rank = LatentTwins.rank

    def noted(
        twins: LatentTwins,
        pages: Tensor,
        page_tokens: int,
        start: int,
        keys: Tensor,
        index: IndexQuery,
        top_k: int,
    ) -> Tensor:
        asked.append(
            (keys.dtype, keys.shape[1], index.query.dtype, index.query.shape[1:], page_tokens, top_k)
        )
        return rank(twins, pages, page_tokens, start, keys, index, top_k)

    monkeypatch.setattr(LatentTwins, "rank", noted)
    model = checkpoints.save(tmp_path, "glm_moe_dsa")
    settings = {"model": model, "dtype": "float32", "max_rows": 1, "max_model_len": 128}
    engine = OfflineEngine(DecoderSettings.model_validate(settings | {"index_dtype": index_dtype}), 8 * 2**20)
    engine.generate([Sequence("r", 0, list(range(5, 60)), Sampling(), seed=0, max_tokens=1)])
    prompts, asked[:] = set(asked), []
    warm_up_latent_prefill(engine.plan, Twins(), LatentTwins(), engine.model.spec, CPU)
    assert set(asked) == prompts
    assert (torch.uint8 in asked[0]) == (index_dtype == "float8")


@pytest.mark.parametrize("kind", KINDS)
def test_every_variant_that_a_chunk_may_attend_with_is_warmed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A card picks one by the chunk's tokens; a short chunk, or a prompt's last, may need another."""
    sizes: list[int] = []
    attend = BlockTwins.attend_chosen

    def noted(twins: BlockTwins, query: Tensor, *rest: Any) -> Part:
        sizes.append(len(query))
        return attend(twins, query, *rest)

    monkeypatch.setattr(BlockTwins, "attend_chosen", noted)
    engine = engine_of(checkpoints.save(tmp_path, KINDS[kind]), max_step_tokens=512)
    spec, card = engine.model.spec, Card("an H200", 9, 132, 227 * 1024)
    warm_up_block_prefill(engine.plan, Twins(), BlockTwins(), spec, CPU)

    def variants(tokens: Iterable[int]) -> set[AttendShape]:
        units = (each * spec.kv_heads for each in tokens)
        return {AttendShape.fitting(128, 4, 64, torch.bfloat16, each, card=card) for each in units}

    assert engine.plan.step_tokens == 512
    assert variants(sizes) == variants(range(1, 513))
    assert len(variants(sizes)) > 1

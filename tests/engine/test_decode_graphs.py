"""A row that drew no token takes nobody along; on a CPU, without graphs."""

from __future__ import annotations

from pathlib import Path

import torch

from services.decoder.engine.decode_graphs import DecodeGraphs, batch_sizes
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.settings import DecoderSettings
from tests.decoder import checkpoints


def test_graphs_are_few_and_padding_is_small() -> None:
    for most in (1, 2, 3, 7, 8, 12, 33, 64, 100, 512, 1000):
        sizes = batch_sizes(most)
        assert sizes[-1] == most
        assert sizes == sorted(set(sizes))
        for rows in range(1, most + 1):
            size = next(size for size in sizes if size >= rows)
            assert size <= rows * 1.25
    assert len(batch_sizes(64)) == 18
    assert len(batch_sizes(512)) < 40


def test_a_row_whose_logits_were_no_numbers_is_computed_in_vain_and_the_others_well(tmp_path: Path) -> None:
    """The step ahead takes the tokens that were drawn last, -1 among them, before anybody has seen those."""
    settings = DecoderSettings.model_validate(
        {
            "model": checkpoints.save(tmp_path, "llama"),
            "dtype": "float32",
            "max_rows": 2,
            "max_model_len": 128,
        }
    )
    engine = OfflineEngine(settings, 8 * 2**20)
    pair = [
        Sequence(name, 0, [5, 6, first], Sampling(), seed=0, max_tokens=9)
        for name, first in (("a", 7), ("b", 8))
    ]
    engine.scheduler.submit(pair)
    while not all(sequence.generated for sequence in pair):
        engine.step()
    rows = [sequence.row for sequence in pair if sequence.row is not None]
    runner, drawn = engine.runner, torch.full((2,), -1, dtype=torch.int32)
    graphs = DecodeGraphs(
        runner.model,
        runner.shape,
        runner.tables,
        runner.heart,
        drawn,
        engine.plan.max_blocks,
        capture=False,
    )
    positions = [sequence.computed for sequence in pair]
    with torch.inference_mode():
        sound = graphs.run(rows, positions, [pair[0].generated[-1], 3])[0].clone()
        drawn[0] = pair[0].generated[-1]
        assert torch.equal(graphs.run(rows, positions, from_draw=[0, 1])[0], sound)

"""The twin of attend_latent against a loop that anyone can check by eye."""

from __future__ import annotations

import pytest
import torch

from services.decoder.kernels.attend_latent import attend_latent

pytestmark = pytest.mark.usefixtures("one_thread")

LATENT, ROPED = 6, 2


@pytest.mark.parametrize("block_tokens", [1, 3])
@pytest.mark.parametrize("heads", [1, 5])
def test_every_head_weighs_the_tokens_that_its_row_chose(heads: int, block_tokens: int) -> None:
    generator = torch.Generator().manual_seed(1)
    pool = torch.full((12, block_tokens, LATENT + ROPED), float("nan"), dtype=torch.float64)
    slots = torch.tensor([[3, -1, 7, 0], [5, 4, -1, -1]], dtype=torch.int32)
    selected = torch.tensor([[0, -1, 2, 5], [1, 0, -1, -1]], dtype=torch.int32)
    length = torch.tensor([5 * block_tokens + 1, 2 * block_tokens])
    used = slots[slots >= 0].long()
    pool[used] = torch.randn(
        used.shape[0], block_tokens, LATENT + ROPED, dtype=torch.float64, generator=generator
    )
    query = torch.randn(2, heads, LATENT + ROPED, dtype=torch.float64, generator=generator)
    out = attend_latent(query, pool, slots, selected, length, 0.3, LATENT)
    for row in range(2):
        records = [
            pool[slot, offset]
            for slot, block in zip(slots[row].tolist(), selected[row].tolist(), strict=True)
            for offset in range(block_tokens)
            if block >= 0 and block * block_tokens + offset < length[row]
        ]
        for head in range(heads):
            weights = torch.stack([query[row, head] @ record * 0.3 for record in records]).softmax(0)
            expected = sum(weight * record[:LATENT] for weight, record in zip(weights, records, strict=True))
            torch.testing.assert_close(out[row, head], expected)

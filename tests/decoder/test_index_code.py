"""Index keys in eight bits: what the code keeps, what it loses, and that scores are those of the codes."""

from __future__ import annotations

import pytest
import torch

from services.decoder.kernels.choose_tokens import IndexQuery, score_tokens
from services.decoder.kernels.index_code import TAIL_BYTES, code_keys, code_query, decode_keys, hadamard

CPU = torch.device("cpu")


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("size", [1, 2, 32, 128])
def test_the_rotation_keeps_products(size: int) -> None:
    rotation = hadamard(size, CPU)
    assert torch.equal(rotation, rotation.t())
    assert torch.allclose(rotation @ rotation, torch.eye(size), atol=1e-6)


@pytest.mark.parametrize("size", [0, 3, 48])
def test_other_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="no Hadamard matrix"):
        hadamard(size, CPU)


def test_a_key_comes_back_within_its_last_bit() -> None:
    """Half of e4m3's last bit is a sixteenth of a number; outliers do not cost the others their bits."""
    rotation, keys = hadamard(128, CPU), numbers(500, 128)
    keys[:, 7] *= 40
    keys[3] = 0
    entries = code_keys(keys, rotation)
    assert entries.shape == (500, 128 + TAIL_BYTES)
    turned = keys @ rotation
    error = (decode_keys(entries) - turned).abs()
    assert bool((error <= turned.abs() / 16 + turned.abs().amax(1, keepdim=True) / 448 / 512 + 1e-9).all())
    assert not decode_keys(entries)[3].any()
    small = (decode_keys(entries) @ rotation - keys)[:, :7].abs().mean()
    assert small < 0.15, "an outlier took the others' bits"


def test_scores_are_those_of_the_codes_and_choose_nearly_the_same() -> None:
    rotation, keys = hadamard(128, CPU), numbers(4000, 128)
    index = IndexQuery(numbers(3, 32, 128), numbers(3, 32).abs())
    entries, asked = code_keys(keys, rotation), IndexQuery(*code_query(*index, rotation))
    scores = score_tokens(asked, entries)
    plain = score_tokens(IndexQuery(asked.query.float(), asked.weight), decode_keys(entries))
    assert torch.equal(scores, plain)
    best, exact = (found.topk(512, 1).indices for found in (scores, score_tokens(index, keys)))
    overlap = torch.stack([torch.isin(*pair).float().mean() for pair in zip(best, exact, strict=True)])
    assert overlap.min() > 0.95

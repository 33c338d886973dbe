"""Latent records in eight bits: e4m3 in tiles of 128 with a scale each, and the roped numbers in bfloat16.

A scale is the least power of two that brings its tile within e4m3. Floating point loses no bits by that, and
what comes back is an exact number of whatever type attention computes in, the same on every device. The code
is not exact: records are coded once, when they are made, and from then on are the same to everybody.

Knows records; not where they lie. docs/records.md draws the bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

TILE = 128
"""Latent numbers that share a scale."""
_NONE = 0x7F  # e4m3's NaN
_PIECE = 16
"""Bytes: what is copied at once. The scales, the roped numbers and so a record begin and end at multiples."""
_TO_NEXT_POWER = 0x1FFFFF
"""Carries a float32's bits into its exponent, if it is more than 1.75 times a power of two, as 448 is not."""
_LEAST_EXPONENT = 27
"""Of a scale, 2^-100: products with the smallest codes stay normal numbers."""


def roped_at(latent: int) -> int:
    """Where the roped numbers begin in a record, bytes: behind the codes and their scales."""
    return latent + _whole_pieces(latent // TILE * 4)


def coded_bytes(latent: int, roped: int) -> int:
    """Of a record; `latent` is a multiple of TILE."""
    return roped_at(latent) + _whole_pieces(2 * roped)


def code_records(records: Tensor, latent: int) -> Tensor:
    """Numbers to bytes. A tile with a number that is not finite comes back as NaN, all of it.

    Args:
        records: [n, latent + roped].
        latent: a multiple of TILE.

    Returns:
        [n, coded_bytes(latent, roped)] uint8.
    """
    tiles = records[:, :latent].float().reshape(-1, latent // TILE, TILE)
    scale = _scale_of(tiles.abs().amax(2))
    codes = (tiles / scale.unsqueeze(2)).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = codes.masked_fill_(scale.isnan().unsqueeze(2), _NONE).flatten(1)
    roped = records[:, latent:].to(torch.bfloat16)
    roped = torch.where(roped.isnan(), float("nan"), roped)  # which NaN it was would tell devices apart
    return torch.cat([_in_pieces(part.view(torch.uint8)) for part in (codes, scale, roped)], 1)


def decode_records(coded: Tensor, latent: int, roped: int, dtype: torch.dtype) -> Tensor:
    """[n, coded_bytes(latent, roped)] uint8 -> [n, latent + roped] of `dtype`."""
    count, first = latent // TILE, roped_at(latent)
    scale = coded[:, latent : latent + count * 4].contiguous().view(torch.float32)
    tiles = coded[:, :latent].view(torch.float8_e4m3fn).float().reshape(-1, count, TILE)
    numbers = (tiles * scale.unsqueeze(2)).flatten(1).to(dtype)
    turned = coded[:, first : first + 2 * roped].contiguous().view(torch.bfloat16).to(dtype)
    return torch.cat([numbers, turned], 1)


def _scale_of(most: Tensor) -> Tensor:
    """Of tiles whose largest absolute numbers are `most` float32; NaN where that is not finite."""
    exponent = ((most.view(torch.int32) + _TO_NEXT_POWER) >> 23) - 8
    scale = (exponent.clamp_min(_LEAST_EXPONENT) << 23).view(torch.float32)
    return torch.where(most.isfinite(), scale, float("nan"))


def _in_pieces(part: Tensor) -> Tensor:
    """[n, bytes] with zeros up to whole pieces."""
    return pad(part, (0, _whole_pieces(part.shape[1]) - part.shape[1]))


def _whole_pieces(size: int) -> int:
    return -(-size // _PIECE) * _PIECE

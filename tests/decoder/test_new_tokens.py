"""What kernels that write each row's newest token would read wrongly is refused, by name."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from services.decoder.kernels.gpu.new_tokens import check_new_tokens


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@dataclass(frozen=True)
class Rows:
    seats: Tensor = field(default_factory=lambda: ints(3))
    length: Tensor = field(default_factory=lambda: ints(3))
    real_rows: Tensor = field(default_factory=lambda: ints(1))
    host_pages: Tensor = field(default_factory=lambda: ints(5, 7))
    device_pages: Tensor = field(default_factory=lambda: ints(5, 7))


def test_what_fits_passes() -> None:
    check_new_tokens(Rows())


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"length": ints(2)}, r"length must be \[3\]"),
        ({"real_rows": ints(3)}, r"real_rows \[1\]"),
        ({"host_pages": ints(5, 6)}, "one shape"),
        ({"seats": ints(3).long()}, "seats must be contiguous int32"),
        ({"device_pages": ints(7, 5).T}, "device_pages must be contiguous int32"),
    ],
)
def test_what_does_not_is_named(wrong: dict[str, Tensor], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        check_new_tokens(replace(Rows(), **wrong))

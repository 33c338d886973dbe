"""linear.cu against float64: all divisions of the work, odd sizes; a row has the same bits in any company."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from services.decoder.kernels.gpu.dense import GpuDense
from services.decoder.kernels.gpu.linear import LinearCall, LinearShape

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 7e-4}


@dataclass(frozen=True)
class Case:
    rows: int
    features: int
    depth: int
    gated: bool = False
    bias: bool = False


CASES = [
    Case(1, 8, 8),
    Case(1, 24, 64, bias=True),
    Case(2, 1000, 584, bias=True),
    Case(3, 576, 576),
    Case(8, 4096, 4096),
    Case(9, 6144, 4096, bias=True),
    Case(16, 4096, 1032),
    Case(17, 2056, 12288),
    Case(32, 136, 520),
    Case(33, 4096, 4096, bias=True),
    Case(64, 5000, 2048),
    Case(1, 1536, 576, gated=True),
    Case(5, 12288, 4096, gated=True),
    Case(16, 1000, 584, gated=True),
    Case(31, 8, 16, gated=True),
    Case(64, 3000, 4096, gated=True),
]


@dataclass
class Product:
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    gated: bool

    def expected(self) -> Tensor:
        product = self.x.double() @ self.weight.double().T
        if self.gated:
            gate, up = product.chunk(2, dim=1)
            return functional.silu(gate) * up
        return product if self.bias is None else product + self.bias.double()

    def by_kernel(self, shape: LinearShape) -> Tensor:
        features = self.weight.shape[0] // (2 if self.gated else 1)
        guarded = self.x.new_full((self.x.shape[0] + 2, features), 7.0)
        out = guarded[1:-1]
        call = LinearCall(self.x, self.weight, self.bias, out)
        call.check(shape)
        call.launch(shape)
        assert bool((guarded[0] == 7).all() and (guarded[-1] == 7).all()), "written outside"
        return out


def product(case: Case, dtype: torch.dtype) -> Product:
    generator = torch.Generator(device="cuda").manual_seed(case.features)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda")

    width = case.features * (2 if case.gated else 1)
    return Product(
        x=random(case.rows, case.depth).to(dtype),
        weight=(random(width, case.depth) * case.depth**-0.5).to(dtype),
        bias=random(case.features).to(dtype) if case.bias else None,
        gated=case.gated,
    )


def divisions(rows: int, gated: bool, dtype: torch.dtype) -> list[LinearShape]:
    """Ways to divide the work, for at least `rows` rows."""
    padded = max(8, 1 << (rows - 1).bit_length())
    wide = LinearShape.filling(padded, gated, dtype, 1)
    return [
        wide,
        replace(wide, bulk=False),
        replace(wide, slots=11),
        LinearShape.filling(padded, gated, dtype, 2),
        LinearShape.filling(padded, gated, dtype, 3),
    ]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_division_gives_the_product_in_the_same_bits(case: Case, dtype: torch.dtype) -> None:
    given = product(case, dtype)
    results = [given.by_kernel(shape) for shape in divisions(case.rows, case.gated, dtype)]
    expected = given.expected()
    error = (results[0].double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype]
    for other in results[1:]:
        assert torch.equal(other, results[0])


@pytest.mark.parametrize("gated", [False, True])
def test_a_row_does_not_depend_on_the_rows_beside_it(gated: bool) -> None:
    given = product(Case(64, 4096, 4096, gated), torch.bfloat16)
    shape = LinearShape.filling(64, gated, torch.bfloat16, 2)
    together = given.by_kernel(shape)
    for rows in (1, 7, 8, 16, 30, 32):
        part = replace(given, x=given.x[:rows].contiguous())
        for shape in divisions(rows, gated, torch.bfloat16):
            assert torch.equal(part.by_kernel(shape), together[:rows])


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.float32], ids=str)
@pytest.mark.parametrize("case", [*CASES, Case(65, 64, 64), Case(2, 7, 9), Case(0, 16, 16)], ids=str)
def test_ops_take_everything(case: Case, dtype: torch.dtype) -> None:
    given, ops = product(case, dtype), GpuDense()
    out = ops.gated(given.x, given.weight) if given.gated else ops.linear(given.x, given.weight, given.bias)
    expected = given.expected()
    assert out.shape == expected.shape
    if case.rows:
        error = (out.double() - expected).norm() / expected.norm()
        assert error < TOLERANCE.get(dtype, 1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": (9, 64)}, "1 to 8 rows"),
        ({"x": (8, 60), "weight": (32, 60)}, "multiples of 8"),
        ({"weight": (40, 64)}, "weight must be contiguous"),
        ({"bias": (31,)}, "bias must be contiguous"),
    ],
)
def test_what_the_kernel_would_read_wrongly_is_refused(
    change: dict[str, tuple[int, ...]], message: str
) -> None:
    sizes = {"x": (8, 64), "weight": (32, 64), "bias": (32,), "out": (change.get("x", (8, 64))[0], 32)}
    tensors = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in (sizes | change).items()}
    call = LinearCall(tensors["x"], tensors["weight"], tensors["bias"], tensors["out"])
    with pytest.raises(ValueError, match=message):
        call.check(LinearShape(8, gated=False, dtype=torch.bfloat16, m_tiles=1, slots=8))

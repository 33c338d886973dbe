"""rms_norm.cu against its twin: any size, with and without a residual sum."""

from __future__ import annotations

import pytest
import torch

from services.decoder.kernels.dense import TorchDense
from services.decoder.kernels.gpu.dense import GpuDense
from services.decoder.kernels.gpu.norm import NormCall, NormShape

pytestmark = pytest.mark.gpu

SIZES = [(1, 8), (1, 4096), (3, 264), (7, 576), (64, 5120), (2, 8192), (2, 8200), (65, 16384)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_kernel_equals_twin(rows: int, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator(device="cuda").manual_seed(size)
    x, delta = (
        (torch.randn(rows + 2, size, device="cuda", generator=generator) * 3).to(dtype)[1:-1]
        for _ in range(2)
    )
    weight = torch.randn(size, device="cuda", generator=generator).to(dtype)
    guarded, total = x.new_full((rows + 2, size), 7.0), x.new_full((rows + 2, size), 7.0)
    shape = NormShape(size, dtype)
    call = NormCall(x, delta, weight, total[1:-1], guarded[1:-1], 1e-6)
    call.check(shape)
    call.launch(shape)
    expected_total, expected = TorchDense().add_norm(x, delta, weight, 1e-6)
    assert torch.equal(total[1:-1], expected_total)
    # A mean summed in another order moves a number by a unit or two in its last place now and then.
    torch.testing.assert_close(
        guarded[1:-1], expected, rtol=2**-6 if dtype == torch.bfloat16 else 2**-9, atol=0
    )
    for each in (guarded, total):
        assert bool((each[0] == 7).all() and (each[-1] == 7).all()), "written outside"

    call = NormCall(x, None, weight, None, guarded[1:-1], 1e-5)
    call.check(shape)
    call.launch(shape)
    expected = TorchDense().norm(x, weight, 1e-5)
    torch.testing.assert_close(
        guarded[1:-1], expected, rtol=2**-6 if dtype == torch.bfloat16 else 2**-9, atol=0
    )


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    x = torch.randn(40, 4096, device="cuda").bfloat16()
    weight = torch.randn(4096, device="cuda").bfloat16()
    assert torch.equal(GpuDense().norm(x, weight, 1e-6)[3:4], GpuDense().norm(x[3:4], weight, 1e-6))


@pytest.mark.parametrize(("rows", "size", "dtype"), [
    (2, 100, torch.bfloat16), (2, 20000, torch.bfloat16), (2, 64, torch.float32), (0, 64, torch.bfloat16),
])  # fmt: skip
def test_ops_take_everything(rows: int, size: int, dtype: torch.dtype) -> None:
    x, delta = (torch.randn(rows, size, device="cuda").to(dtype) for _ in range(2))
    weight = torch.randn(size, device="cuda").to(dtype)
    assert torch.equal(GpuDense().norm(x, weight, 1e-6), TorchDense().norm(x, weight, 1e-6))
    for mine, theirs in zip(
        GpuDense().add_norm(x, delta, weight, 1e-6),
        TorchDense().add_norm(x, delta, weight, 1e-6),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


def test_what_the_kernel_would_read_wrongly_is_refused() -> None:
    x, weight = torch.zeros(2, 64).half(), torch.zeros(64).half()
    with pytest.raises(ValueError, match="delta and total"):
        NormCall(x, x, weight, None, x, 1e-6).check(NormShape(64, torch.float16))
    with pytest.raises(ValueError, match="x must be contiguous"):
        NormCall(x, None, weight, None, x, 1e-6).check(NormShape(64, torch.bfloat16))
    with pytest.raises(ValueError, match="multiple of 8"):
        NormCall(x, None, weight, None, x, 1e-6).check(NormShape(60, torch.float16))

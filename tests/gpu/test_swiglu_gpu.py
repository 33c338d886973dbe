"""swiglu.cu against its twin, behind a product of many rows."""

from __future__ import annotations

import pytest
import torch

from services.decoder.kernels.gpu.dense import GpuDense
from services.decoder.kernels.gpu.swiglu import SwigluCall, SwigluShape
from services.decoder.kernels.linear import gated_linear, swiglu

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 8), (3, 264), (65, 1536), (4096, 12288)])
def test_kernel_equals_twin(rows: int, size: int, dtype: torch.dtype) -> None:
    both = (torch.randn(rows, 2 * size, device="cuda") * 4).to(dtype)
    both[0, :4] = torch.tensor([80.0, -80.0, 0.0, -0.0])
    out = both.new_full((rows + 2, size), 7.0)
    SwigluCall(both, out[1:-1]).launch(SwigluShape(dtype))
    # Either factor's rounding may fall to the other side: two units of the last place, now and then.
    tolerance = 2**-6 if dtype == torch.bfloat16 else 2**-9
    torch.testing.assert_close(out[1:-1], swiglu(both), rtol=tolerance, atol=4e-6)
    assert bool((out[0] == 7).all() and (out[-1] == 7).all()), "written outside"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_product_of_many_rows_is_the_twins(dtype: torch.dtype) -> None:
    x, weight = (torch.randn(rows, 256, device="cuda").to(dtype) for rows in (300, 2 * 512))
    got, expected = GpuDense().gated(x, weight), gated_linear(x, weight)
    torch.testing.assert_close(got, expected, rtol=2**-6, atol=1e-5)

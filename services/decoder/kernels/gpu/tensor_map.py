"""Descriptions of matrices for the bulk copies of sm_90 and later.

Knows rows and columns, not what is in them.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from cuda.bindings import driver
from torch import Tensor

from services.decoder.kernels.gpu.kernel import check

COLUMNS = 64  # of a box: 128 bytes, the width of the swizzle
BYTES = 128  # of a map
_TYPES = {
    torch.bfloat16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    torch.float16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
}


def tensor_map(matrix: Tensor, box_rows: int) -> bytes:
    """The map of `matrix` for boxes of `box_rows` x 64, swizzled by 128 bytes, zero outside.

    Args:
        matrix: [rows, columns], contiguous, 16-bit; columns a multiple of 8, beginning at 16 bytes.
        box_rows: at most 256.
    """
    return _encode(matrix.data_ptr(), matrix.shape[0], matrix.shape[1], matrix.dtype, box_rows)


@lru_cache(maxsize=8192)  # a map says nothing but its arguments
def _encode(address: int, rows: int, columns: int, dtype: torch.dtype, box_rows: int) -> bytes:
    size, box = driver.cuuint64_t, driver.cuuint32_t
    encoded = check(
        driver.cuTensorMapEncodeTiled(
            _TYPES[dtype],
            2,
            address,
            [size(columns), size(rows)],
            [size(columns * 2)],
            [box(COLUMNS), box(box_rows)],
            [box(1), box(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(encoded.getPtr(), BYTES)

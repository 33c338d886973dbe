"""Where a row's newest token goes, as kernels that write one are told. Knows tables, not what is written."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class NewTokens(Protocol):
    """One launch's rows; contiguous int32."""

    @property
    def seats(self) -> Tensor:
        """[rows], into the tables."""

    @property
    def length(self) -> Tensor:
        """[rows] tokens, the new one included."""

    @property
    def real_rows(self) -> Tensor:
        """[1]."""

    @property
    def host_pages(self) -> Tensor:
        """[table rows, max_pages]."""

    @property
    def device_pages(self) -> Tensor:
        """[table rows, max_pages]."""


def check_new_tokens(call: NewTokens) -> None:
    """Refuse what such a kernel would read wrongly.

    Raises:
        ValueError: a shape, dtype or layout that is off, by name.
    """
    for name in ("seats", "length", "real_rows", "host_pages", "device_pages"):
        tensor: Tensor = getattr(call, name)
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous int32, is {tensor.dtype}")
    rows = call.seats.shape[0]
    if call.length.shape != (rows,) or call.real_rows.shape != (1,):
        raise ValueError(f"length must be [{rows}], real_rows [1]")
    if call.host_pages.shape != call.device_pages.shape:
        raise ValueError("host_pages and device_pages must have one shape")

"""sample on the GPU: shapes checked, a variant of sample.cu chosen, one launch.

The twin in kernels/sample.py is the definition.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.gpu.card import Card
from services.decoder.kernels.gpu.kernel import Kernel
from services.decoder.kernels.sample import SampleInputs, SampleTables, mass_bits

_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_THREADS = 1024
_STATIC_BYTES = 34 * 1024  # of shared memory that the kernel takes beside the keys, and some to spare
_CLUSTERS = (8, 4, 2, 1)


class SampleParams(ctypes.Structure):
    """As sample.cu's struct, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "logits", "seats", "positions", "forced", "barred", "real_rows", "wishes", "seeds", "counts",
            "bias_ids", "biases", "stop_ids", "tokens", "keys",
        )),
        ("row_stride", ctypes.c_int64),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in (
            "vocab", "stretch", "mass_bits", "most_biased", "most_barred",
        )),
    ]  # fmt: skip


@dataclass(frozen=True)
class SampleShape:
    """What a variant is compiled for."""

    vocab: int
    dtype: torch.dtype
    greedy: bool  # the likeliest of the unchanged logits, or the forced token, of every row
    cluster: int  # thread blocks a row
    in_shared: bool = True  # whether a block's keys fit into its shared memory

    @classmethod
    def variants(
        cls, vocab: int, dtype: torch.dtype, *, greedy: bool, card: Card | None = None
    ) -> tuple[SampleShape, ...]:
        """Those that hold a row's keys in shared memory, the widest cluster first, or else the one that needs
        none; without a `card`, of torch's current device. Keep them: each loads its kernel but once.

        Raises:
            ValueError: logits of a dtype that the kernel does not read.
        """
        if dtype not in _ELEMENTS:
            raise ValueError(f"logits must be float32, bfloat16 or float16, not {dtype}")
        card = card or Card.current()
        shapes = (cls(vocab, dtype, greedy, cluster) for cluster in _CLUSTERS)
        fitting = tuple(
            shape
            for shape in shapes
            if shape.shared_bytes <= card.shared_bytes - _STATIC_BYTES
            and (card.has_clusters or shape.cluster == 1)
        )
        return fitting or (cls(vocab, dtype, greedy, cluster=1, in_shared=False),)

    @staticmethod
    def fitting(variants: Sequence[SampleShape], rows: int) -> SampleShape:
        """The widest cluster with which all rows run at once, else the narrowest."""
        return next((shape for shape in variants if rows <= shape.at_once), variants[-1])

    @cached_property
    def at_once(self) -> int:
        """Rows that this device samples at the same time."""
        return self.kernel.most_clusters()

    @property
    def stretch(self) -> int:
        """Tokens of a thread block: whole 16-byte loads."""
        return -(-self.vocab // (8 * self.cluster)) * 8

    @property
    def vector(self) -> int:
        """Elements of a load."""
        elements = 16 // self.dtype.itemsize
        return elements if self.vocab % elements == 0 else 1

    @property
    def keys_per_row(self) -> int:
        """Of the workspace; none where the keys lie in shared memory."""
        return 0 if self.in_shared or self.greedy else self.stretch * self.cluster

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the keys."""
        return 4 * self.stretch if self.in_shared and not self.greedy else 0

    @property
    def defines(self) -> dict[str, int]:
        """The constants that sample.cu's head asks for."""
        return {
            "ELEMENT": _ELEMENTS[self.dtype],
            "VECTOR": self.vector,
            "CLUSTER": self.cluster,
            "GREEDY": int(self.greedy),
            "IN_SHARED": int(self.in_shared),
        }

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel(
            "sample",
            self.defines,
            threads=_THREADS,
            cluster=self.cluster,
            shared_bytes=self.shared_bytes,
            overlaps=True,
        )


@dataclass(frozen=True, slots=True)
class SampleCall:
    """One launch: everything but the variant."""

    tables: SampleTables
    inputs: SampleInputs
    logits: Tensor  # [R, vocab]; rows may lie apart
    tokens: Tensor  # out [R] int32
    scale: float  # factor on the logits
    keys: Tensor | None = None  # [R, keys_per_row] int32 workspace of a shape that needs it

    def launch(self, shape: SampleShape) -> None:
        """Launch on torch's current stream."""
        tables, inputs = self.tables, self.inputs
        parameters = SampleParams(
            logits=self.logits.data_ptr(),
            seats=inputs.seats.data_ptr(),
            positions=inputs.positions.data_ptr(),
            forced=inputs.forced.data_ptr(),
            barred=inputs.barred.data_ptr(),
            real_rows=inputs.real_rows.data_ptr(),
            wishes=tables.wishes.data_ptr(),
            seeds=tables.seeds.data_ptr(),
            counts=tables.counts.data_ptr(),
            bias_ids=tables.bias_ids.data_ptr(),
            biases=tables.biases.data_ptr(),
            stop_ids=tables.stop_ids.data_ptr(),
            tokens=self.tokens.data_ptr(),
            keys=0 if self.keys is None else self.keys.data_ptr(),
            row_stride=self.logits.stride(0),
            scale=self.scale,
            vocab=shape.vocab,
            stretch=shape.stretch,
            mass_bits=mass_bits(shape.vocab),
            most_biased=tables.bias_ids.shape[1],
            most_barred=tables.stop_ids.shape[1],
        )
        shape.kernel.launch(self.logits.shape[0] * shape.cluster, parameters)

    def check(self, shape: SampleShape) -> None:
        """Refuse what the kernel would read wrongly; once, before the first launch.

        Raises:
            ValueError: a shape, dtype or layout that is off, by name.
        """
        rows, tables, inputs = self.logits.shape[0], self.tables, self.inputs
        if self.logits.dtype != shape.dtype or self.logits.shape[1:] != (shape.vocab,):
            raise ValueError(f"logits must be [rows, {shape.vocab}] {shape.dtype}")
        if self.logits.stride(1) != 1 or self.logits.stride(0) % shape.vector or self.logits.data_ptr() % 16:
            raise ValueError("logits must be contiguous within a row, and rows aligned to 16 bytes")
        if shape.vocab > 2**24:
            raise ValueError(f"a vocabulary of {shape.vocab} leaves the weights too few bits")
        for name in ("seats", "positions", "forced", "barred"):
            tensor = getattr(inputs, name)
            if tensor.dtype != torch.int32 or tensor.shape != (rows,) or not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous [{rows}] int32")
        if (
            self.tokens.dtype != torch.int32
            or self.tokens.shape != (rows,)
            or not self.tokens.is_contiguous()
        ):
            raise ValueError(f"tokens must be contiguous [{rows}] int32")
        if tables.counts.dtype != torch.int32 or tables.counts.shape[1] != shape.vocab:
            raise ValueError(f"counts must be [table rows, {shape.vocab}] int32")
        held = 0 if self.keys is None or self.keys.dtype != torch.int32 else self.keys.numel()
        if held < rows * shape.keys_per_row:
            raise ValueError(f"keys must be [{rows}, {shape.keys_per_row}] int32")

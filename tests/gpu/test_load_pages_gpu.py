"""load_pages.cu against its twin: pages out of registered host memory, beside other work or alone."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.decoder.kernels.gpu.host_memory import RegisteredMemory
from services.decoder.kernels.gpu.load_pages import BLOCKS, LoadPagesCall, LoadPagesShape
from services.decoder.kernels.gpu.step_kernels import GpuKernels
from services.decoder.kernels.load_pages import load_pages

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")


@dataclass(frozen=True)
class Case:
    layers: int
    page_bytes: int
    host_pages: int
    pages: int


CASES = [
    Case(3, 262144, 40, 33),
    Case(1, 16, 9, 9),
    Case(5, 8448, 70, 50),
    Case(2, 73728, 30, 1),
    Case(2, BLOCKS * 512 * 16 + 16, 12, 7),
]


class Rig:
    """Random bytes on the host, as the device addresses them, and pools that hold something else."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(case.page_bytes)
        size = case.layers * case.host_pages * case.page_bytes
        self.memory = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.host = torch.frombuffer(self.memory, dtype=torch.uint8)[:size]
        self.host.random_()
        self.registered = RegisteredMemory(self.host.data_ptr(), len(self.memory))
        shape = (case.layers, case.host_pages, case.page_bytes)
        self.sources = list(self._on_device(size).view(shape))
        self.targets = list(torch.full((case.layers, case.pages + 3, case.page_bytes), 7, device=CUDA).byte())
        places = torch.randperm(case.pages + 3)[: case.pages]
        self.pages = torch.stack([torch.randperm(case.host_pages)[: case.pages], places]).to(CUDA)
        self.expected = [target.clone() for target in self.targets]
        load_pages([layer.to(CUDA) for layer in self.host.view(shape)], self.expected, self.pages)

    def _on_device(self, size: int) -> Tensor:
        class Bytes:
            __cuda_array_interface__ = {  # noqa: RUF012  # the protocol's name
                "shape": (size,),
                "typestr": "|u1",
                "data": (self.registered.device_address, False),
                "version": 3,
            }

        return torch.as_tensor(Bytes(), device=CUDA)

    def is_right(self) -> bool:
        return all(torch.equal(*both) for both in zip(self.targets, self.expected, strict=True))

    def close(self) -> None:
        torch.cuda.synchronize()
        self.registered.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pages_are_the_twins(case: Case) -> None:
    """And nothing beside them is written."""
    rig = Rig(case)
    GpuKernels(1, 1, CUDA).load_pages(rig.sources, rig.targets, rig.pages)
    assert rig.is_right()
    rig.close()


def test_pages_come_while_another_stream_works() -> None:
    """It does not wait for the others' work, nor they for it."""
    rig, kernels = Rig(CASES[0]), GpuKernels(1, 1, CUDA)
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def load() -> None:
        with torch.cuda.stream(beside):
            kernels.load_pages(rig.sources, rig.targets, rig.pages)

    load()  # compiles
    torch.cuda.synchronize()
    rig.targets[0].fill_(7)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]  # half a second of the current stream
    load()
    beside.synchronize()
    assert not torch.cuda.current_stream().query()
    assert rig.is_right()
    rig.close()


def test_what_it_would_read_wrongly_is_refused() -> None:
    pool = [torch.zeros(4, 64, dtype=torch.uint8, device=CUDA)]
    pages = torch.zeros(2, 1, dtype=torch.int64, device=CUDA)
    shape = LoadPagesShape(64)
    odd = torch.zeros(4 * 64 + 8, dtype=torch.uint8, device=CUDA)[8:].view(4, 64)
    for call, reason in (
        (LoadPagesCall(pool, [], pages), "1 layers of sources, 0 of targets"),
        (LoadPagesCall(pool, pool, pages.int()), r"pages must be \[2, n\] int64"),
        (LoadPagesCall(pool, pool, pages[0]), r"pages must be \[2, n\] int64"),
        (LoadPagesCall(pool, pool, pages.cpu()), "pages must be contiguous on the GPU"),
        (LoadPagesCall(pool, [pool[0][:, :48].contiguous()], pages), "must be 64 bytes, is 48"),
        (LoadPagesCall(pool, [odd], pages), "multiples of 16 bytes"),
        (LoadPagesCall([pool[0].cpu()], pool, pages), "contiguous on the GPU"),
    ):
        with pytest.raises(ValueError, match=reason):
            call.check(shape)

"""A small arena on a tmpfs, one row of it, and the streamed path between it and a GPU, without any model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from services.contract.layout import ArenaLayout
from services.decoder.kernels.gpu.step_kernels import GpuKernels
from services.decoder.kv.arena_map import ArenaMap
from services.decoder.kv.batch import PrefillChunk
from services.decoder.kv.row_tables import RowTables
from services.decoder.kv.shape import KvShape
from services.decoder.kv.streamed_path import StreamedPath

CUDA = torch.device("cuda:0")
CPU = torch.device("cpu")
SHAPE = KvShape(
    layers=3, kv_heads=4, head_dim=64, groups=4, block_tokens=16, page_tokens=64, dtype=torch.bfloat16
)
WINDOW = 256  # tokens
PAGES = 50
LONG = 200_000_000  # clock cycles, some 100 ms


def sleep(cycles: int = LONG) -> None:
    """On the current stream."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # torch leaves it untyped


class Rig:
    """An arena, one row of it, and the path; `on_host` is the arena as the CPU sees it."""

    def __init__(self, path: Path, edge_bytes: int = 2**33) -> None:
        planes = SHAPE.planes(with_index=False)
        self.layout = ArenaLayout.fit(
            2**21 + PAGES * sum(plane.page_bytes for plane in planes), SHAPE.page_tokens, planes
        )
        path.write_bytes(b"\xff" * self.layout.arena_bytes)
        self.arena = ArenaMap(path, self.layout, SHAPE, CUDA)
        self.on_host = ArenaMap(path, self.layout, SHAPE, CPU)
        self.tables = RowTables(2, PAGES, CUDA)
        pages = torch.randperm(self.layout.page_count, generator=torch.Generator().manual_seed(1))[:30]
        pages[4:8] = pages[4:8].sort().values
        self.tables.put(1, 0, pages.tolist(), [0] * 30)
        kernels = GpuKernels(1, SHAPE.kv_heads, CUDA)
        self.path = StreamedPath(kernels, self.arena, SHAPE, WINDOW, CUDA, reads=True, edge_bytes=edge_bytes)
        torch.cuda.synchronize()

    @classmethod
    def warm(cls, path: Path) -> Rig:
        """A rig that has made all of a test's launches before, over zeros: the first launch of a kernel loads
        its code, and that waits for every stream, however late.
        """
        rig = cls(path)
        nothing = torch.zeros(1000, SHAPE.kv_heads, SHAPE.head_dim, dtype=SHAPE.dtype, device=CUDA)
        made(1000)
        sleep()
        for start, end in ((0, 960), (960, 1000)):
            rig.step(nothing, nothing, start, end)
            torch.cuda.synchronize()
        return rig

    def chunk(self, start: int, end: int) -> PrefillChunk:
        return PrefillChunk.build(SHAPE, self.tables, 1, start, end)

    def step(
        self, key: Tensor, value: Tensor, start: int, end: int, before: Callable[[], None] = lambda: None
    ) -> list[tuple[Tensor, Tensor]]:
        """A chunk through all layers, whose records differ by a factor; what each layer read before it."""
        chunk = self.chunk(start, end)
        run = slice(start, end)
        self.path.begin([chunk], reads=True)
        before()
        read = []
        for layer in range(SHAPE.layers):
            self.path.write(layer, chunk, key[run] * (layer + 1), value[run] * (layer + 1))
            windows = [(w.key.clone(), w.value.clone()) for w in self.path.windows(layer, chunk)]
            if windows:
                read.append((torch.cat([w[0] for w in windows]), torch.cat([w[1] for w in windows])))
        self.path.finish()
        return read

    def stored(self, tokens: int) -> list[Tensor]:
        """[tokens, groups, record] of each layer, read by the CPU, now."""
        pages = self.tables.arena_pages(1, SHAPE.pages_for(tokens)).long()
        return [
            self.on_host.kv_blocks(layer)
            .view(-1, SHAPE.groups, SHAPE.page_tokens, SHAPE.record_elements)[pages]
            .transpose(1, 2)
            .flatten(0, 1)[:tokens]
            .clone()
            for layer in range(SHAPE.layers)
        ]


def made(tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device=CUDA).manual_seed(tokens)
    both = torch.randn(2, tokens, SHAPE.kv_heads, SHAPE.head_dim, device=CUDA, generator=generator)
    return both[0].bfloat16(), both[1].bfloat16()


def is_right(read: list[tuple[Tensor, Tensor]], key: Tensor, value: Tensor) -> bool:
    """Whether every layer has read all of `key` and `value`."""
    return len(read) == SHAPE.layers and all(
        torch.equal(got[0], key * (layer + 1)) and torch.equal(got[1], value * (layer + 1))
        for layer, got in enumerate(read)
    )

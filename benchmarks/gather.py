"""The roof beside resolve: a plain gather of the same records, launch for launch.

Knows a rig's misses; decides nothing on the device.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from benchmarks.gpu_timing import seconds_of
from benchmarks.resolve_rig import Rig
from services.decoder.kernels.gpu.kernel import Kernel

# Threads of a block, loads of each in flight, whether launches overlap as resolve's do. None was faster.
_SHAPES = [
    (256, 1, True),
    (256, 4, True),
    (1024, 1, False),
    (1024, 1, True),
    (1024, 4, False),
    (1024, 4, True),
]


class GatherParams(ctypes.Structure):
    """As gather.cu's struct."""

    _fields_ = [
        ("source", ctypes.c_void_p),
        ("destination", ctypes.c_void_p),
        ("arena", ctypes.c_void_p),
        ("pool", ctypes.c_void_p),
        ("records", ctypes.c_int32),
    ]


def gather_us(rig: Rig) -> float:
    """Microseconds a launch of a plain gather of the same records, launch for launch, at its best shape."""
    case = rig.case
    launches = []
    for step in range(1, rig.steps + 1):
        for calls in rig.layers:
            call = calls[step]
            source = rig.missing_homes(call, step)
            target = torch.randperm(case.lanes * case.capacity, device="cuda")[: source.shape[0]].int()
            launches.append((call, source, target))
    best = float("inf")
    for threads, depth, overlaps in _SHAPES:
        kernel = gather_kernel(case.block_bytes, threads, depth, overlaps)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call, source, target in launches:
                parameters = GatherParams(
                    source=source.data_ptr(),
                    destination=target.data_ptr(),
                    arena=call.arena_pointer,
                    pool=call.pool.data_ptr(),
                    records=source.shape[0],
                )
                kernel.launch(torch.cuda.get_device_properties().multi_processor_count, parameters)
        best = min(best, seconds_of(graph.replay, lambda: None, 5) / len(launches) * 1e6)
    return best


@cache
def gather_kernel(block_bytes: int, threads: int, depth: int, overlaps: bool) -> Kernel:
    """One variant of gather.cu."""
    return Kernel(
        "gather",
        {"BLOCK_BYTES": block_bytes, "THREADS": threads, "DEPTH": depth},
        threads=threads,
        cluster=1,
        shared_bytes=0,
        overlaps=overlaps,
        folder=Path(__file__).parent,
    )

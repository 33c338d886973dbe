"""A compiled kernel on the current device, and its launch with one struct of parameters.

Knows grids, clusters and streams; not what the struct means.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

from services.decoder.kernels.gpu.card import Card
from services.decoder.kernels.gpu.compile import KERNELS, compile_kernel


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call.

    Raises:
        RuntimeError: the call failed.
    """
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        name = driver.cuGetErrorName(status)[1]
        raise RuntimeError(f"CUDA driver: {name.decode() if name else status}")
    return values[0] if values else None


class Kernel:
    """One entry point, compiled for this device with these definitions."""

    def __init__(
        self,
        name: str,
        defines: Mapping[str, int],
        *,
        threads: int,
        cluster: int,
        shared_bytes: int,
        overlaps: bool = False,
        folder: Path = KERNELS,
    ) -> None:
        """Compile (or take from the cache), load, and allow `shared_bytes` of dynamic shared memory.

        `overlaps`: the kernel may begin before the one ahead of it has ended, as device.cuh says.

        Raises:
            SetupError: it does not compile, or needs more shared memory than this device has.
        """
        major, minor = torch.cuda.get_device_capability()
        code = compile_kernel(name, defines, f"sm_{major}{minor}", folder)
        self._library = check(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
        kernel = check(driver.cuLibraryGetKernel(self._library, name.encode()))
        self._function = check(driver.cuKernelGetFunction(kernel))
        attribute = driver.CUfunction_attribute
        limit = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        try:
            check(driver.cuFuncSetAttribute(self._function, limit, shared_bytes))
        except RuntimeError as error:
            raise Card.current().refusal(
                f"{name}.cu with {dict(defines)}",
                shared_bytes,
                "serve this model on a card with more, or run with --device cpu",
            ) from error
        if cluster > 8:
            wide = attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            check(driver.cuFuncSetAttribute(self._function, wide, 1))
        self._threads, self._cluster, self._shared_bytes = threads, cluster, shared_bytes
        self._overlaps = overlaps and major >= 9

    def most_clusters(self) -> int:
        """Clusters (thread blocks, if they are single) that run at once on this device."""
        if self._cluster == 1:
            blocks = check(
                driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    self._function, self._threads, self._shared_bytes
                )
            )
            return int(blocks) * torch.cuda.get_device_properties().multi_processor_count
        return int(check(driver.cuOccupancyMaxActiveClusters(self._function, self._config(self._cluster))))

    def launch(self, blocks: int, parameters: ctypes.Structure) -> None:
        """Launch on torch's current stream, captured if the stream is capturing.

        Args:
            blocks: a multiple of the cluster's size.
            parameters: passed by value.
        """
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        check(driver.cuLaunchKernelEx(self._config(blocks), self._function, ctypes.addressof(pointers), 0))

    def _config(self, blocks: int) -> driver.CUlaunchConfig:
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        attributes = []
        if self._cluster > 1:
            wide = driver.CUlaunchAttribute()
            wide.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            wide.value.clusterDim.x = self._cluster
            wide.value.clusterDim.y = 1
            wide.value.clusterDim.z = 1
            attributes.append(wide)
        if self._overlaps:
            early = driver.CUlaunchAttribute()
            early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            attributes.append(early)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

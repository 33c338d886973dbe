"""What this machine has: looked up, not judged; judged by checks.py.

Knows the system's own files and libraries. Needs no extra, and starts nothing but UCX's own ucx_info.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from services.contract.mount import Mount, mount_of

DECODER_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "fastapi",
    "uvicorn",
    "jinja2",
    "gguf",
)
GPU_PACKAGES = ("cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc")
_ATTRIBUTE_MAJOR, _ATTRIBUTE_MINOR = 75, 76  # CUdevice_attribute
_UCX_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card, as its driver tells it."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Driver:
    """NVIDIA's, if it is there."""

    cuda: tuple[int, int] | None = None  # the newest CUDA that it runs; None = there is no driver
    gpus: tuple[Gpu, ...] = ()
    trouble: str = ""  # where it is there and does not work


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that is judged."""

    python: tuple[int, int]
    lacking: tuple[str, ...]  # packages of the decoder extra
    driver: Driver
    gpu_lacking: tuple[str, ...]  # packages of the gpu extra
    nvrtc: str  # its version; "" = it cannot be loaded
    torch_cuda: str  # the CUDA that torch was built for; "" = a CPU build, or no torch
    memlock_bytes: int | None  # the most that this process may pin; None = no limit
    open_files: int  # that a process may have
    mount: Mount | None  # of the arena's directory; None = it is not there
    memory_free_bytes: int
    busy_ports: tuple[int, ...]
    ucx: tuple[str, ...] | None  # its transports; None = ucxx is not installed
    ucx_trouble: str = ""


def look(arena_directory: Path, ports: Sequence[int]) -> Facts:
    """Look everything up.

    Args:
        arena_directory: where the arena is to lie, or the nearest directory above it that is there.
        ports: that services are to listen on, of this machine's loopback.
    """
    ucx, ucx_trouble = ucx_transports()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Facts(
        python=sys.version_info[:2],
        lacking=absent(DECODER_PACKAGES),
        driver=driver(),
        gpu_lacking=absent(GPU_PACKAGES),
        nvrtc=nvrtc_version(),
        torch_cuda=torch_cuda(),
        memlock_bytes=None if soft == resource.RLIM_INFINITY or _may_pin() else soft,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        mount=_mount(arena_directory),
        memory_free_bytes=memory_free(),
        busy_ports=tuple(port for port in ports if busy(port)),
        ucx=ucx,
        ucx_trouble=ucx_trouble,
    )


def absent(packages: Sequence[str]) -> tuple[str, ...]:
    """Those that are not installed."""
    found = []
    for name in packages:
        try:
            version(name)
        except PackageNotFoundError:
            found.append(name)
    return tuple(found)


def torch_cuda() -> str:
    """From the file in which torch says how it was built; importing it would take seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    file = Path(spec.origin).with_name("version.py")
    found = re.search(r"^cuda.*= '([\d.]+)'", file.read_text() if file.is_file() else "", re.MULTILINE)
    return found[1] if found else ""


def driver() -> Driver:
    """What libcuda says; it needs no toolkit and no package."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Driver()
    number = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return Driver(trouble="libcuda.so.1 is there and does not tell its version")
    newest = (number.value // 1000, number.value % 1000 // 10)
    status = cuda.cuInit(0)
    if status != 0:
        return Driver(newest, trouble=f"cuInit fails with CUDA error {status}")
    cuda.cuDeviceGetCount(ctypes.byref(number))
    return Driver(newest, tuple(_gpu(cuda, index) for index in range(number.value)))


def _gpu(cuda: ctypes.CDLL, index: int) -> Gpu:
    device, major, minor, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(100)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _ATTRIBUTE_MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _ATTRIBUTE_MINOR, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    return Gpu(name.value.decode(errors="replace"), (major.value, minor.value), memory.value)


def nvrtc_version() -> str:
    """Of the compiler of kernels, as our packages load it."""
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        return ""
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError:  # it looks for the library only now
        return ""
    return f"{major}.{minor}" if int(status) == 0 else ""


def memory_free() -> int:
    """What programs could still take of this machine's memory; 0 where the kernel does not say."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def busy(port: int) -> bool:
    """Whether a service could not listen there now, on the loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error.errno in (errno.EADDRINUSE, errno.EACCES)
    return False


def ucx_transports() -> tuple[tuple[str, ...] | None, str]:
    """The transports that UCX finds here, None where ucxx is not installed; and what went wrong."""
    if absent(("ucxx-cu13",)):
        return None, ""
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None:
        return (), "libucx, which ucxx stands on, is not installed"
    place = Path(spec.origin).parent
    environment = os.environ | {"LD_LIBRARY_PATH": str(place / "lib"), "UCX_LOG_LEVEL": "error"}
    try:
        told = subprocess.run(
            [place / "bin/ucx_info", "-d"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_UCX_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return (), f"ucx_info: {error}"
    return tuple(dict.fromkeys(re.findall(r"Transport: (\S+)", told.stdout))), ""


def _mount(directory: Path) -> Mount | None:
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        return mount_of(directory)
    except OSError:
        return None


def _may_pin() -> bool:
    """Whether this process has CAP_IPC_LOCK, which no limit holds."""
    found = re.search(r"^CapEff:\s+([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return bool(found and int(found[1], 16) >> 14 & 1)

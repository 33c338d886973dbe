"""Judges what was found: fine, could be better, or in the way; and says what to type.

Knows what hotset needs; looks nothing up. Without a GPU everything runs on the CPU, so nothing of a GPU is
needed then, unless it was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from services.command.doctor.facts import Facts
from services.contract.byte_size import format_bytes

Verdict = Literal["ok", "note", "fail"]
LEAST_CAPABILITY = (8, 0)
LEAST_CUDA = (13, 0)
FILES_WANTED = 4096
"""Open at once: a connection a stream, and some hundred of our own."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""  # what to type


def judge(facts: Facts, arena_bytes: int, *, need_gpu: bool) -> list[Check]:
    """Every line, in order.

    Args:
        facts: what was found.
        arena_bytes: that the arena is to have.
        need_gpu: a GPU is wanted, so that its absence is a failure.
    """
    return [
        _python(facts),
        _packages(facts),
        *_gpu(facts, need_gpu),
        *_pinning(facts, arena_bytes),
        *_arena(facts, arena_bytes),
        _files(facts),
        _ports(facts),
        _ucx(facts),
    ]


def _python(facts: Facts) -> Check:
    told = f"{facts.python[0]}.{facts.python[1]}"
    if (3, 11) <= facts.python <= (3, 13):
        return Check("Python", "ok", told)
    return Check("Python", "fail", told, "make run PYTHON=/path/to/python3.12   # 3.11, 3.12 or 3.13")


def _packages(facts: Facts) -> Check:
    if not facts.lacking:
        return Check("packages", "ok", "the decoder's are installed")
    return Check(
        "packages",
        "fail",
        f"missing: {', '.join(facts.lacking)}",
        "pip install 'hotset[decoder]' torch==2.13.0",
    )


def _gpu(facts: Facts, need_gpu: bool) -> Iterator[Check]:
    driver = facts.driver
    if driver.cuda is None and not driver.trouble:
        told = "no NVIDIA driver: decoding runs on the CPU"
        advice = "install NVIDIA's driver, 580 or newer; in a container: docker run --gpus all ..."
        yield Check("GPU driver", "fail" if need_gpu else "note", told, advice if need_gpu else "")
        return
    if driver.trouble or not driver.gpus:
        told = driver.trouble or "the driver sees no card"
        yield Check(
            "GPU driver", "fail", told, "nvidia-smi   # says more; in a container: docker run --gpus all ..."
        )
        return
    newest = driver.cuda or (0, 0)
    told = f"for CUDA {newest[0]}.{newest[1]}"
    if newest < LEAST_CUDA:
        yield Check(
            "GPU driver", "fail", told, "install NVIDIA's driver 580 or newer (CUDA 13), or --device cpu"
        )
    else:
        yield Check("GPU driver", "ok", told)
    for number, gpu in enumerate(driver.gpus):
        major, minor = gpu.capability
        told = f"{gpu.name}, {format_bytes(gpu.memory_bytes)}, compute capability {major}.{minor}"
        if gpu.capability >= LEAST_CAPABILITY:
            yield Check(f"GPU {number}", "ok", told)
        else:
            usable = any(other.capability >= LEAST_CAPABILITY for other in driver.gpus)
            advice = (
                "name another card: --device cuda:N"
                if usable
                else "hotset serve --device cpu   # 8.0 is needed"
            )
            yield Check(f"GPU {number}", "note" if usable else "fail", told, advice)
    if facts.torch_cuda:
        yield Check("torch", "ok", f"built for CUDA {facts.torch_cuda}")
    else:
        yield Check(
            "torch",
            "fail",
            "a build for the CPU",
            "pip install torch==2.13.0   # from an index with CUDA builds",
        )
    if facts.gpu_lacking:
        yield Check(
            "kernels", "fail", f"missing: {', '.join(facts.gpu_lacking)}", "pip install 'hotset[gpu]'"
        )
    elif facts.nvrtc:
        yield Check("kernels", "ok", f"NVRTC {facts.nvrtc} compiles them at first use")
    else:
        advice = "pip install --force-reinstall 'nvidia-cuda-nvrtc>=13,<14'"
        yield Check("kernels", "fail", "NVRTC cannot be loaded", advice)


def _pinning(facts: Facts, arena_bytes: int) -> Iterator[Check]:
    if not facts.driver.gpus:
        return
    if facts.memlock_bytes is None or facts.memlock_bytes >= arena_bytes:
        most = "no limit" if facts.memlock_bytes is None else format_bytes(facts.memlock_bytes)
        yield Check("memlock", "ok", most)
    else:
        yield Check(
            "memlock",
            "fail",
            f"{format_bytes(facts.memlock_bytes)} may be pinned, the arena has {format_bytes(arena_bytes)}",
            "ulimit -l unlimited   # in a container: docker run --ulimit memlock=-1",
        )


def _arena(facts: Facts, arena_bytes: int) -> Iterator[Check]:
    mount = facts.mount
    if mount is None or mount.file_system != "tmpfs":
        kind = "it is not there" if mount is None else f"it is {mount.file_system}"
        advice = "mount -t tmpfs -o size=2g,huge=advise tmpfs /dev/shm   # or name one: --arena-dir"
        yield Check("arena's tmpfs", "fail", kind, advice)
        return
    told = f"{mount.point}, {format_bytes(min(mount.free_bytes, 2**60))} free"
    if mount.free_bytes < arena_bytes:
        advice = f"{mount.enlarged(arena_bytes)}   # or --arena-bytes; in a container: --shm-size"
        yield Check("arena's tmpfs", "fail", f"{told}, {format_bytes(arena_bytes)} are needed", advice)
    elif facts.memory_free_bytes and facts.memory_free_bytes < arena_bytes:
        told += f", but this machine has only {format_bytes(facts.memory_free_bytes)} of memory left"
        yield Check("arena's tmpfs", "note", told, "choose a smaller --arena-bytes")
    else:
        yield Check("arena's tmpfs", "ok", told)
    if not facts.driver.gpus:
        return  # nothing is registered then
    if mount.allows_huge:
        yield Check("huge pages", "ok", mount.huge)
    else:
        slow = "never: the arena's way into memory takes several times as long"
        yield Check("huge pages", "note", slow, f"mount -o remount,huge=advise {mount.point}")


def _files(facts: Facts) -> Check:
    if facts.open_files >= FILES_WANTED:
        return Check("open files", "ok", f"{facts.open_files:,} at once")
    return Check(
        "open files",
        "note",
        f"{facts.open_files:,} at once: as many streams, less a hundred",
        "ulimit -n 65536   # in a container: docker run --ulimit nofile=65536",
    )


def _ports(facts: Facts) -> Check:
    if not facts.busy_ports:
        return Check("ports", "ok", "free")
    told = ", ".join(map(str, facts.busy_ports))
    first = facts.busy_ports[0]
    return Check(
        "ports", "fail", f"busy: {told}", f"hotset serve --port {first + 1}   # ss -ltnp says who listens"
    )


def _ucx(facts: Facts) -> Check:
    if facts.ucx is None:
        return Check("UCX", "note", "not installed: stores exchange pages over plain sockets, or not at all")
    if facts.ucx_trouble or not facts.ucx:
        return Check(
            "UCX",
            "fail",
            facts.ucx_trouble or "finds no transport",
            "pip install --force-reinstall 'hotset[ucx]'",
        )
    return Check("UCX", "ok", ", ".join(facts.ucx))

"""CUDA C++ to machine code by NVRTC, cached on disk. Needs no GPU and no driver.

Knows sources and definitions, not what a kernel does.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from cuda.core import Program, ProgramOptions

from services.contract.errors import SetupError

KERNELS = Path(__file__).parent
_COMMON = KERNELS / "device.cuh"
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


def cache_directory() -> Path:
    """Where compiled kernels lie: $XDG_CACHE_HOME/hotset/kernels, ~/.cache/hotset/kernels."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "hotset" / "kernels"


def compile_kernel(name: str, defines: Mapping[str, int], arch: str, folder: Path = KERNELS) -> bytes:
    """The cubin of `name`.cu.

    Args:
        name: of the source, without `.cu`.
        defines: the constants that the source's head asks for.
        arch: for example `sm_90`.
        folder: of the source.

    Raises:
        SetupError: NVRTC refused; its log is in the message.
    """
    source = _COMMON.read_text() + (folder / f"{name}.cu").read_text()
    source = _INCLUDE.sub(lambda line: (KERNELS / line[1]).read_text(), source)
    options = ProgramOptions(
        std="c++17", arch=arch, define_macro=[(key, str(value)) for key, value in defines.items()]
    )
    digest = hashlib.blake2b(repr((source, sorted(defines.items()), arch)).encode(), digest_size=16)
    cached = cache_directory() / f"{name}-{arch}-{digest.hexdigest()}.cubin"
    if cached.is_file():
        return cached.read_bytes()
    try:
        code = Program(source, "c++", options).compile("cubin").code
    except Exception as error:  # cuda.core's own, which is private
        raise SetupError(
            f"NVRTC cannot compile {name}.cu for {arch} with {dict(defines)}: {error}"
        ) from error
    cached.parent.mkdir(parents=True, exist_ok=True)
    partial = cached.with_suffix(f".{os.getpid()}")
    partial.write_bytes(bytes(code))
    partial.rename(cached)
    return bytes(code)

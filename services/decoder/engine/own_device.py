"""A process with one GPU sees no other: what names no device then lies where the tensors do.

Knows the name of a device and the environment that CUDA reads when it starts; no torch.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from services.contract.errors import SetupError

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def keep_to(device: str, environment: MutableMapping[str, str]) -> str:
    """Hide every GPU but `device`, and say what it is called now. Before CUDA starts in this process.

    Streams, events, contexts and pinned memory are those of a thread's current device, which is the first one
    that CUDA sees, in every thread, a library's included.

    Raises:
        SetupError: the environment shows fewer GPUs than that.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number.isdecimal():
        return device
    shown = environment.get(_VISIBLE)
    names = None if shown is None else shown.split(",")
    if names is not None and int(number) >= len(names):
        raise SetupError(
            f"there is no {device}: {_VISIBLE}={shown} shows {len(names)} GPUs; show more, or name another"
        )
    environment[_VISIBLE] = number if names is None else names[int(number)].strip()
    return "cuda:0"

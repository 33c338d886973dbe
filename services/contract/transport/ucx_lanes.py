"""Which lanes an endpoint of UCX really uses, asked of UCX itself, and whether they are those asked for.

Knows ucp.h's `ucp_ep_query`, because ucxx does not pass it on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, ClassVar

from services.contract.errors import SetupError

_TRANSPORTS = 1 << 3  # UCP_EP_ATTR_FIELD_TRANSPORTS
_MOST = 32

LANE_KINDS: Mapping[str, tuple[str, ...]] = {
    "shm": ("posix", "sysv", "xpmem", "knem", "cma"),
    "rdma": ("rc", "dc", "ud", "gga", "srd"),
    "tcp": ("tcp",),
}
"""What may be asked for -> how the names of UCX's transports begin."""

_ALIASES: Mapping[str, tuple[str, ...]] = {"shm": ("sm", "shm", "mm"), "rdma": ("ib",), "tcp": ()}
"""The same for what UCX_TLS may name besides."""


class _Entry(ctypes.Structure):
    _fields_: ClassVar[Any] = [("transport", ctypes.c_char_p), ("device", ctypes.c_char_p)]


class _Attributes(ctypes.Structure):
    """ucp_ep_attr_t of UCX 1.19 and later."""

    _fields_: ClassVar[Any] = [
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local", ctypes.c_char * 128),  # sockaddr_storage
        ("remote", ctypes.c_char * 128),
        ("entries", ctypes.POINTER(_Entry)),
        ("entry_count", ctypes.c_uint),
        ("entry_bytes", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p),
    ]


def lanes_of(endpoint_handle: int) -> tuple[str, ...]:
    """The lanes of an endpoint as `transport/device`, sorted; its handle is ucxx's `endpoint.handle`.

    Raises:
        SetupError: UCX does not say.
    """
    library = ctypes.CDLL("libucp.so.0")  # loaded already, by ucxx
    library.ucp_ep_query.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Attributes)]
    entries = (_Entry * _MOST)()
    asked = _Attributes(field_mask=_TRANSPORTS, entry_count=_MOST, entry_bytes=ctypes.sizeof(_Entry))
    asked.entries = ctypes.cast(entries, ctypes.POINTER(_Entry))
    status = library.ucp_ep_query(endpoint_handle, ctypes.byref(asked))
    if status:
        raise SetupError(f"UCX does not say which lanes it uses (status {status})")
    used = entries[: asked.entry_count]
    return tuple(sorted({f"{entry.transport.decode()}/{entry.device.decode()}" for entry in used}))


def check_lanes(lanes: tuple[str, ...], wanted: str) -> None:
    """Refuse lanes that are not what was asked for.

    Raises:
        SetupError: `wanted` is a kind of LANE_KINDS, and another kind carries the bytes.
    """
    if wanted == "any":
        return
    if not lanes or not all(lane.startswith(LANE_KINDS[wanted]) for lane in lanes):
        raise SetupError(
            f"UCX was to use {wanted} lanes and uses {', '.join(lanes) or 'none'}; see docs/transport.md, "
            "or accept any with --ucx-lanes any"
        )


def allowed_lanes(tls: str, wanted: str) -> str:
    """Of the lanes `tls` those that are `wanted`, as UCX_TLS: for who cannot ask UCX which it uses.

    Raises:
        SetupError: there are none, or they are not named one by one.
    """
    if wanted == "any":
        return tls
    kinds = (*LANE_KINDS[wanted], *_ALIASES[wanted])
    names = [name for name in tls.split(",") if name == "self" or name.startswith(kinds)]
    if not {*names} - {"self"}:
        raise SetupError(
            f"--ucx-lanes {wanted} leaves none of --ucx-tls {tls}; name lanes of that kind one by one"
        )
    return ",".join(names)


def may_use(tls: str, wanted: str) -> tuple[str, ...]:
    """The same as labels, for who cannot say more: `may/tcp`.

    Raises:
        SetupError: as `allowed_lanes`.
    """
    return tuple(f"may/{name}" for name in allowed_lanes(tls, wanted).split(",") if name != "self")

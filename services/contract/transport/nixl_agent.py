"""An agent of nixl over its UCX: memory registered with it, peers that it has met, reads under way.

Knows nixl's bindings; not what is read, nor by when. It belongs to one thread. Where `serves` is set a thread
of nixl's lets UCX make progress, asleep while nothing happens: over lanes in software a read needs the
source's help.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from services.contract.errors import SetupError
from services.contract.transport.nixl_library import load_nixl
from services.contract.transport.ucx_lanes import allowed_lanes, may_use
from services.contract.transport.ucx_worker import UcxOptions

_LONGEST_SLEEP_MICROSECONDS = 50_000  # of nixl's thread: an event that UCX does not signal is noticed then

Pieces = npt.NDArray[np.uint64]
"""`[n, 3]`: address, length in bytes, 0."""


class NixlAgent:
    """One agent, its name known to nobody before."""

    def __init__(self, options: UcxOptions, *, serves: bool) -> None:
        """Start it.

        Raises:
            SetupError: nixl is missing, or its UCX cannot be set up as `options` say.
        """
        allowed = allowed_lanes(options.tls, options.lanes)
        library = load_nixl()
        self.version = library.version
        self.lanes = may_use(options.tls, options.lanes)  # which of them carries a read, nixl does not tell
        self._core = core = library.core
        config = core.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = serves, _LONGEST_SLEEP_MICROSECONDS
        config.useListenThread = config.captureTelemetry = False
        config.syncMode = core.NIXL_THREAD_SYNC_STRICT
        try:
            with _told_to_ucx(allowed, options.devices):
                self._agent = core.nixlAgent(f"hotset-{secrets.token_hex(8)}", config)
                self._backend = [self._agent.createBackend("UCX", {})]
        except Exception as error:  # nixl's errors have no common root
            raise SetupError(
                f"nixl cannot be set up with UCX_TLS={allowed} on {options.devices}: {error}; "
                "see docs/transport.md"
            ) from error

    def register(self, buffer: memoryview) -> int:
        """Let reads end in `buffer`, or begin there; its address. It stays the agent's until `close`.

        Raises:
            SetupError: nixl cannot register it.
        """
        place = np.frombuffer(buffer, np.uint8)
        start = int(place.ctypes.data)
        try:
            wanted = self._core.nixlRegDList(self._core.DRAM_SEG, [(start, len(place), 0, "")])
            self._agent.registerMem(wanted, self._backend)
        except Exception as error:  # as above
            raise SetupError(f"nixl cannot register {len(place)} bytes of memory: {error}") from error
        return start

    def metadata(self) -> bytes:
        """What another agent must know to read everything that is registered with this one."""
        told: bytes = self._agent.getLocalMD()
        return told

    def meet(self, metadata: bytes) -> str:
        """Take up another agent's metadata; its name.

        Raises:
            ValueError: it is none, or that agent cannot be reached from here.
        """
        try:
            name: str = self._agent.loadRemoteMD(metadata).decode()
        except Exception as error:  # as above
            raise ValueError(f"no way to this agent: {error}") from error
        return name

    def read(self, peer: str, theirs: Pieces, ours: Pieces) -> int:
        """Begin to read pieces of `peer`'s memory into ours, nixl's until `release`; the read's number.

        Raises:
            ValueError: the peer is lost, or a piece is not of registered memory.
        """
        core = self._core
        try:
            number: int = self._agent.createXferReq(
                core.NIXL_READ,
                core.nixlXferDList(core.DRAM_SEG, ours),
                core.nixlXferDList(core.DRAM_SEG, theirs),
                peer,
                b"",
                self._backend,
            )
        except Exception as error:  # as above
            raise ValueError(f"the read cannot begin: {error}") from error
        try:
            self._agent.postXferReq(number, b"")
        except Exception as error:  # as above
            self.release(number)
            raise ValueError(f"the read cannot begin: {error}") from error
        return number

    def done(self, number: int) -> bool:
        """Let UCX make progress; whether a read has ended with all bytes in place.

        Raises:
            ValueError: it failed.
        """
        core = self._core
        try:
            status = self._agent.getXferStatus(number)
        except Exception as error:  # as above
            raise ValueError(f"the read failed: {error}") from error
        if status not in (core.NIXL_SUCCESS, core.NIXL_IN_PROG):
            raise ValueError(f"the read failed: {status}")
        return bool(status == core.NIXL_SUCCESS)

    def release(self, number: int) -> bool:
        """Let go of a read; False where it goes on, so that its memory is nixl's until `close`."""
        try:
            self._agent.releaseXferReq(number)
        except Exception:  # noqa: BLE001  # no common root; a read that cannot be ended goes with the agent
            return False
        return True

    def close(self) -> None:
        """End it, and with it whatever is under way."""
        self._agent = None


@contextmanager
def _told_to_ucx(lanes: str, devices: str) -> Iterator[None]:
    """UCX reads its environment while a backend is made, and nixl has no other way to say all of this."""
    wanted = {"UCX_TLS": lanes} | ({} if devices == "all" else {"UCX_NET_DEVICES": devices})
    before: dict[str, Any] = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

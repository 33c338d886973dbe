"""A UCX worker with its own progress: spin a little, then arm the worker and sleep on its descriptor.

Knows ucxx's core API; not what messages mean. Everything but `wake` belongs to the thread that made it:
closing a failed endpoint while another thread makes progress can end the process.

Every receive is into staging's buffers: ucxx does not refuse a strided or read-only one, it writes past it.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.contract.errors import SetupError
from services.contract.transport.checksum import load_checksum
from services.contract.transport.ucx_address import open_address, seal_address
from services.contract.transport.ucx_lanes import lanes_of
from services.contract.transport.ucx_library import load_ucx

_LONGEST_SLEEP_SECONDS = 1.0  # an event that UCX does not signal is noticed then
_CLOSE_NANOSECONDS, _CLOSE_ATTEMPTS = 1_000_000, 20
TRUNCATED = "truncated"


@dataclass(frozen=True, slots=True)
class UcxOptions:
    """How UCX is to be set up."""

    tls: str = "tcp,sm,self"  # UCX_TLS: what it may use
    devices: str = "lo"  # UCX_NET_DEVICES: the interfaces it listens on; loopback unless told otherwise
    lanes: str = "any"  # what it must use: any, shm, rdma or tcp
    spin_seconds: float = 100e-6  # before sleeping: 1 KB there and back takes about 13 us


class UcxWorker:
    """One context and worker; see the top of this file."""

    def __init__(self, options: UcxOptions) -> None:
        """Set UCX up.

        Raises:
            SetupError: ucxx is missing, or UCX cannot be set up as `options` say.
        """
        self._ucx = load_ucx()
        core = self._ucx.core
        config = {"TLS": options.tls}
        if options.devices != "all":
            config["NET_DEVICES"] = options.devices
        try:
            self._context = core.UCXContext(config, feature_flags=(core.Feature.TAG, core.Feature.WAKEUP))
            self._worker = core.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
        except core.UCXError as error:
            raise SetupError(
                f"UCX cannot be set up with UCX_TLS={options.tls} on {options.devices}: {error}; "
                "see docs/transport.md"
            ) from error
        self._spin_seconds = options.spin_seconds
        self._full_mask = core.UCXXTagMaskFull
        self._checksum = load_checksum()
        self.address = seal_address(self._worker.address.tobytes(), self._ucx.version, self._checksum)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._sleeping = select.epoll()
        self._sleeping.register(self._bell, select.EPOLLIN)
        self._sleeping.register(self._worker.epoll_file_descriptor, select.EPOLLIN)

    def connect(self, address: bytes) -> Any:
        """An endpoint to the worker with this address.

        Raises:
            ValueError: it is none, or leads nowhere.
        """
        core = self._ucx.core
        plain = open_address(address, self._ucx.version, self._checksum)
        try:
            found = core.UCXAddress.create_from_buffer(plain)
            return self._worker.create_endpoint_from_worker_address(found, endpoint_error_handling=True)
        except core.UCXError as error:
            raise ValueError(f"no endpoint to this address: {error}") from error

    def lanes(self, endpoint: Any) -> tuple[str, ...]:
        """What carries the bytes of `endpoint`."""
        return lanes_of(endpoint.handle)

    def send(self, endpoint: Any, message: bytearray | memoryview, tag: int) -> Any:
        """Begin to send; `message` is UCX's until the request is done.

        Raises:
            ValueError: the endpoint has failed.
        """
        core = self._ucx.core
        try:
            return endpoint.tag_send(self._ucx.array(message), core.UCXXTag(tag))
        except core.UCXError as error:
            raise ValueError(str(error)) from error

    def receive(self, buffer: memoryview, tag: int) -> Any:
        """Begin to receive the message with exactly this tag; `buffer` is UCX's until the request is done."""
        _check(buffer)
        return self._worker.tag_recv(self._ucx.array(buffer), self._ucx.core.UCXXTag(tag), self._full_mask)

    def arrived(self, tag: int, mask: int) -> Any:
        """A message that nobody has asked for and whose tag fits under `mask`, or None; for `take`."""
        core = self._ucx.core
        probe = self._worker.tag_probe(core.UCXXTag(tag), core.UCXXTagMask(mask), remove=True)
        return probe if probe.matched else None

    def take(self, buffer: memoryview, arrival: Any) -> Any:
        """Begin to receive what has arrived; every arrival must be taken, and once."""
        _check(buffer)
        return self._worker.tag_recv_with_handle(self._ucx.array(buffer), arrival)

    def outcome(self, request: Any) -> str | None:
        """What went wrong with a request that is done; None if nothing did."""
        core = self._ucx.core
        try:
            request.check_error()
        except (core.UCXMessageTruncatedError, core.UCXMsgTruncated):
            return TRUNCATED
        except core.UCXError as error:
            return str(error) or type(error).__name__
        return None

    def progress(self) -> None:
        """Let UCX do what can be done now."""
        self._worker.progress()

    def run(self, done: Callable[[], bool], until: float, *, spin: bool = True) -> bool:
        """Make progress until `done()`, or `until` (monotonic); whether it was done.

        Args:
            done: asked after every progress.
            until: monotonic, seconds.
            spin: stay awake for a moment first; large transfers need not.
        """
        awake = time.monotonic() + (self._spin_seconds if spin else 0.0)
        while True:
            self._worker.progress()
            if done():
                return True
            now = time.monotonic()
            if now >= until:
                return False
            if now >= awake:
                self._sleep(until - now)
            else:
                os.sched_yield()  # where the peer waits for this core

    def _sleep(self, seconds: float) -> None:
        """Until something happens, `seconds` at most; not at all if there is something to do."""
        if self._worker.arm() and self._sleeping.poll(min(seconds, _LONGEST_SLEEP_SECONDS)):
            try:
                os.eventfd_read(self._bell)
            except BlockingIOError:
                return  # it was not the bell

    def wake(self) -> None:
        """Interrupt `run`; from any thread."""
        os.eventfd_write(self._bell, 1)

    def disconnect(self, endpoint: Any) -> None:
        """Let go of an endpoint, whatever state it is in, within some 20 ms."""
        if endpoint.alive:
            endpoint.close_blocking(period=_CLOSE_NANOSECONDS, max_attempts=_CLOSE_ATTEMPTS)

    def close(self) -> None:
        """Let go of everything. Buffers of requests that are not done must be given up, not used again."""
        self._sleeping.close()
        self._worker.cancel_inflight_requests(_CLOSE_NANOSECONDS, _CLOSE_ATTEMPTS)
        del self._worker, self._context
        os.close(self._bell)


def _check(buffer: memoryview) -> None:
    if not buffer.contiguous or buffer.readonly:
        raise ValueError("UCX receives into contiguous, writable memory only")

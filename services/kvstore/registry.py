"""Finds other stores by etcd: this store's address stands there under a lease, and theirs are watched.

Knows etcd's wire and addresses; not what peers are asked. A store does without it: while etcd is out of
reach the peers known last are kept, a warning is logged, and it is tried again. A watch only tells that
something has changed; the list is read anew then, so no change is ever applied twice or in the wrong order.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import cycle

import grpc
from hotset.v1 import etcd_pb2 as pb
from hotset.v1 import etcd_pb2_grpc as rpc

from services.contract.errors import HotsetError, SetupError, Unavailable
from services.contract.rpc_call import answer_of
from services.contract.wire_security import WireSecurity

_log = logging.getLogger(__name__)
_RETRY_SECONDS = 1.0
_CALL_SECONDS = 3.0
_FAREWELL_SECONDS = 0.5
_NOTICE = Callable[[Sequence[str]], Awaitable[None]]


def reachable(listening: str) -> str:
    """The address to tell others of a store that listens at `listening`.

    Raises:
        SetupError: others can't use it: it is a path, or every interface.
    """
    host = listening.rpartition(":")[0].strip("[]")
    if listening.startswith("unix:") or host in ("0.0.0.0", "::", "*"):
        raise SetupError(
            f"others cannot reach this store at {listening}; say with --advertise host:port where they can"
        )
    if host in ("localhost", "::1") or host.startswith("127."):
        _log.warning(
            "advertises_loopback address=%s: stores on other machines cannot reach it there, or take it "
            "for their own; say with --advertise host:port where they can",
            listening,
        )
    return listening


class Registry:
    """One store's; of one event loop."""

    def __init__(
        self,
        endpoints: Sequence[str],
        prefix: str,
        address: str,
        lease_seconds: float,
        security: WireSecurity,
        notice: _NOTICE,
    ) -> None:
        """Nothing is called before `start`.

        Args:
            endpoints: of etcd, host:port; tried in turn.
            prefix: of the keys of stores that may be each other's peers.
            address: at which others reach this store's gRPC.
            lease_seconds: how long others believe in a silent store; etcd may make it a bit longer.
            security: certificates for etcd, if it asks for them.
            notice: hears the addresses of the other stores, sorted, whenever they change.
        """
        self._endpoints = cycle(endpoints)
        self._prefix = prefix.encode()
        self._end = self._prefix[:-1] + bytes([self._prefix[-1] + 1])  # the first key behind the prefix
        self._address = address
        self._lease_seconds = math.ceil(lease_seconds)
        self._security = security
        self._notice = notice
        self._others: list[str] = []
        self._task: asyncio.Task[None] | None = None
        self.connected = False

    def start(self) -> None:
        """Register and watch from now on."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop, and tell the others at once, if etcd can be reached."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        told = False
        while True:
            endpoint = next(self._endpoints)
            try:
                # A channel each time: one that has failed waits longer and longer before it tries again.
                async with self._security.aio_channel(endpoint) as channel:
                    await self._follow(channel, endpoint)
            except (HotsetError, TimeoutError, asyncio.InvalidStateError) as error:
                if self.connected or not told:
                    _log.warning(
                        "etcd_unreachable endpoint=%s peers_kept=%d error=%s",
                        endpoint,
                        len(self._others),
                        error or "no answer in time",
                    )
                told, self.connected = True, False
            except Exception:  # noqa: BLE001  # a fault of ours must not leave the store without peers for good
                self.connected = False
                _log.exception("registry_failed endpoint=%s", endpoint)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _follow(self, channel: grpc.aio.Channel, endpoint: str) -> None:
        """Register, then renew and watch until one of both fails.

        Raises:
            HotsetError, TimeoutError: etcd is out of reach, or has forgotten the lease.
        """
        leases, keys = rpc.LeaseStub(channel), rpc.KVStub(channel)
        granted = await answer_of(
            leases.LeaseGrant(pb.LeaseGrantRequest(ttl=self._lease_seconds), timeout=_CALL_SECONDS)
        )
        try:
            entry = pb.PutRequest(
                key=self._prefix + self._address.encode(), value=self._address.encode(), lease=granted.id
            )
            await answer_of(keys.Put(entry, timeout=_CALL_SECONDS))
            revision = await self._read(keys)
            self.connected = True
            _log.info("etcd_registered endpoint=%s address=%s", endpoint, self._address)
            work = [
                asyncio.create_task(self._renew(leases, granted)),
                asyncio.create_task(self._watch(channel, keys, revision)),
            ]
            try:
                await asyncio.gather(*work)
            finally:
                for task in work:
                    task.cancel()
                await asyncio.gather(*work, return_exceptions=True)
        except asyncio.CancelledError:
            with suppress(HotsetError):
                await answer_of(
                    leases.LeaseRevoke(pb.LeaseRevokeRequest(id=granted.id), timeout=_FAREWELL_SECONDS)
                )
            raise

    async def _read(self, keys: rpc.KVAsyncStub) -> int:
        """Read who is there, tell whom it concerns; the revision that this is of."""
        found = await answer_of(
            keys.Range(pb.RangeRequest(key=self._prefix, range_end=self._end), timeout=_CALL_SECONDS)
        )
        others = sorted({entry.value.decode(errors="replace") for entry in found.kvs} - {self._address})
        if others != self._others:
            await self._notice(others)
            self._others = others  # only now: a notice that is cut off is given again
        return found.header.revision

    async def _renew(self, leases: rpc.LeaseAsyncStub, granted: pb.LeaseGrantResponse) -> None:
        call = leases.LeaseKeepAlive()
        while True:
            await asyncio.sleep(granted.ttl / 3)
            await answer_of(call.write(pb.LeaseKeepAliveRequest(id=granted.id)))
            async with asyncio.timeout(granted.ttl):
                reply = await answer_of(call.read())
            if not isinstance(reply, pb.LeaseKeepAliveResponse) or reply.ttl <= 0:
                raise Unavailable("etcd knows nothing of this store's lease any more")

    async def _watch(self, channel: grpc.aio.Channel, keys: rpc.KVAsyncStub, revision: int) -> None:
        call = rpc.WatchStub(channel).Watch()
        created = pb.WatchCreateRequest(key=self._prefix, range_end=self._end, start_revision=revision + 1)
        await answer_of(call.write(pb.WatchRequest(create_request=created)))
        while True:
            reply = await answer_of(call.read())
            if not isinstance(reply, pb.WatchResponse) or reply.canceled:
                raise Unavailable("etcd has ended the watch")
            if reply.events:
                await self._read(keys)

"""The store's data plane, put together from the settings: what answers stores and decoders, what asks stores.

Knows which class stands behind which setting; nothing of how they work. Off unless asked for.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from services.contract.errors import SetupError
from services.contract.transport.counters import TransportCounters
from services.contract.transport.mapped import MappedRequester
from services.contract.transport.nixl_agent import NixlAgent
from services.contract.transport.nixl_responder import NixlResponder
from services.contract.transport.protocol import Requester
from services.contract.transport.tcp_requester import TcpRequester
from services.contract.transport.tcp_responder import TcpResponder
from services.contract.transport.ucx_requester import UcxRequester
from services.contract.transport.ucx_responder import UcxResponder
from services.contract.transport.ucx_worker import UcxOptions
from services.contract.wire_security import NO_SECURITY, WireSecurity
from services.kvstore.data_service import DataService
from services.kvstore.mapped_source import MappedSource
from services.kvstore.nixl_source import read_over_nixl
from services.kvstore.page_fetch import Face, PageFetcher
from services.kvstore.page_source import PageSource
from services.kvstore.peer_link import PeerLink
from services.kvstore.peer_links import PeerLinks
from services.kvstore.peers import Peers, PullCounters
from services.kvstore.registry import Registry, reachable
from services.kvstore.settings import KvStoreSettings
from services.kvstore.slot_desk import SlotDesk
from services.kvstore.store_parts import StoreParts
from services.kvstore.turns import Turns


class DataFigures(NamedTuple):
    """What the metrics show."""

    transport: str
    served: TransportCounters
    asked: TransportCounters
    served_pages: int
    read_pieces: int
    written_pieces: int
    pulls: PullCounters
    lanes: tuple[str, ...]  # in use, either way
    held_bytes: int
    peers: int  # stores that a match may ask
    registered: bool  # at etcd, now


class DataPlane:
    """Make it in a running event loop, whose thread it then belongs to."""

    def __init__(self, settings: KvStoreSettings, parts: StoreParts, security: WireSecurity) -> None:
        """Answer and ask as the settings say.

        Raises:
            SetupError: an address cannot be had, UCX cannot be set up, or a package is missing.
        """
        self.transport = settings.data_transport
        self._parts = parts
        self._options = UcxOptions(
            tls=settings.ucx_tls, devices=settings.ucx_devices, lanes=settings.ucx_lanes
        )
        self._served, self._asked = TransportCounters(), TransportCounters()
        self._source = PageSource(parts)
        self._slots = SlotDesk(parts, Turns(asyncio.get_running_loop()))
        service = DataService(parts, self._source, self._slots)
        self._responder: TcpResponder | UcxResponder | NixlResponder | None = None
        if self.transport == "tcp":
            self._responder = TcpResponder(settings.data_listen.encode(), service, self._served)
        elif self.transport == "ucx":
            self._responder = UcxResponder(self._options, service, self._served)
        elif self.transport == "nixl":
            self._responder = self._offer_over_nixl(security)
        self._fetcher = PageFetcher(self._connect)
        self._peers: Peers | None = None
        self._registry: Registry | None = None
        if settings.peer_addresses or settings.etcd_addresses:
            if self.transport == "off":
                raise SetupError(
                    "--peers and --etcd need a --data-transport: tcp, ucx, nixl, or mapped on one node"
                )
            name = f"store-{secrets.token_hex(4)}"
            links = PeerLinks(lambda address: PeerLink(address, name, security), settings.peer_addresses)
            self._peers = Peers(parts, links, self.transport, self._fetcher, settings.pull_seconds)

    def join(self, settings: KvStoreSettings, listening: str) -> None:
        """Let other stores find this one, which listens at `listening`, and find them, if that is wanted.

        Raises:
            SetupError: there is no address to tell them.
        """
        if self._peers is None or not settings.etcd_addresses:
            return
        self._registry = Registry(
            settings.etcd_addresses,
            settings.etcd_prefix,
            settings.advertise or reachable(listening),
            settings.lease_seconds,
            WireSecurity.read(settings.etcd_wire_dir),
            self._peers.follow,
        )
        self._registry.start()

    @property
    def faces(self) -> tuple[tuple[str, bytes], ...]:
        """Transports and addresses at which pages are read, for those who attach."""
        address = b"" if self._responder is None else self._responder.address
        return ((self.transport, address),) if address else ()

    @property
    def asks(self) -> bool:
        """Whether there are peers."""
        return self._peers is not None

    @property
    def figures(self) -> DataFigures:
        """As they are now; from any thread."""
        lanes: Sequence[str] = self._fetcher.lanes
        if isinstance(self._responder, UcxResponder | NixlResponder):
            lanes = (*lanes, *self._responder.lanes)
        return DataFigures(
            transport=self.transport,
            served=self._served,
            asked=self._asked,
            served_pages=self._source.pages,
            read_pieces=self._slots.read_pieces,
            written_pieces=self._slots.written_pieces,
            pulls=self._peers.counters if self._peers else PullCounters(),
            lanes=tuple(sorted(set(lanes))),
            held_bytes=self._responder.held_bytes if self._responder else 0,
            peers=self._peers.count if self._peers else 0,
            registered=self._registry is not None and self._registry.connected,
        )

    async def fill(self, page_hashes: Sequence[bytes]) -> None:
        """Have what peers know of a chain here, best effort and in bounded time."""
        if self._peers is not None:
            await self._peers.fill(page_hashes)

    async def close(self) -> None:
        """Say goodbye, stop asking, then answering."""
        if self._registry is not None:
            await self._registry.close()
        if self._peers is not None:
            await self._peers.close()
        if self._responder is not None:  # not in this thread: its own may wait for a turn of the loop
            await asyncio.get_running_loop().run_in_executor(None, self._responder.close)

    def _connect(self, face: Face, seconds: float) -> Requester:
        if self.transport == "tcp":
            return TcpRequester(face.address, face.credentials, self._asked, seconds)
        if self.transport == "ucx":
            return UcxRequester(face.address, face.credentials, self._asked, seconds, self._options)
        header = self._parts.arena.header
        assert header is not None, "nothing is fetched into an arena that is not laid out"
        if self.transport == "nixl":
            return read_over_nixl(face.address, self._options, header, self._asked, seconds)
        source = MappedSource(Path(face.address.decode()), header)
        return MappedRequester(source, face.credentials.session, self._asked)

    def _offer_over_nixl(self, security: WireSecurity) -> NixlResponder:
        if security == NO_SECURITY:
            raise SetupError(
                "--data-transport nixl needs a --wire-dir on every store and decoder: whoever is told this "
                "arena's address may read and write all of it, so only who has the token or a certificate is"
            )
        # Once here, too: what is wrong is told now, and no pull waits half a second for libraries to load.
        NixlAgent(self._options, serves=False).close()
        return NixlResponder(self._options, self._parts.arena.path, self._served)

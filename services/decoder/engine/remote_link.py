"""A remote engine's way to its store's bytes: the session says where, a requester of that transport asks.

Knows which class stands behind which transport; nothing of what is asked.
"""

from __future__ import annotations

from services.contract.errors import SetupError, Unavailable
from services.contract.layout import ArenaLayout
from services.contract.transport.counters import TransportCounters
from services.contract.transport.protocol import Requester
from services.contract.transport.tcp_requester import TcpRequester
from services.contract.transport.ucx_requester import UcxRequester
from services.contract.transport.ucx_worker import UcxOptions
from services.contract.wire_security import WireSecurity
from services.decoder.engine.client_name import client_name
from services.decoder.engine.remote_session import RemoteSession
from services.decoder.engine.settings import EngineSettings
from services.decoder.engine.store_session import StoreSession
from services.decoder.kv.remote_arena import Connection, RemoteArena


def open_session(settings: EngineSettings, security: WireSecurity) -> StoreSession:
    """The engine's session with its store, by the access that the settings name."""
    kind = RemoteSession if settings.store_access == "remote" else StoreSession
    return kind(settings.kvstore, client_name(settings), security)


def remote_arena(session: RemoteSession, settings: EngineSettings, layout: ArenaLayout) -> RemoteArena:
    """The store's arena as `session` may read and write it, connected: its calls belong to this thread.

    Raises:
        SetupError: the bytes cannot be had, or not over the lanes that are wanted.
    """
    options = UcxOptions(tls=settings.ucx_tls, devices=settings.ucx_devices, lanes=settings.ucx_lanes)
    counters = TransportCounters()

    def connect(seconds: float) -> Connection:
        face = session.face(seconds)
        if face.transport == "tcp":
            requester: Requester = TcpRequester(face.address, face.credentials, counters, seconds)
        elif face.transport == "ucx":
            requester = UcxRequester(face.address, face.credentials, counters, seconds, options)
        else:
            raise SetupError(
                f"kvstore offers the transport {face.transport!r}, which this engine does not know"
            )
        return Connection(requester, face.credentials.generation)

    arena = RemoteArena(layout, connect, lambda pages: session.lives(pages.tolist()), settings.store_seconds)
    try:
        arena.open()
    except Unavailable as error:
        raise SetupError(
            f"kvstore at {settings.kvstore} answers, its data plane does not ({error}); "
            "look at its --data-listen or --ucx-devices, and at this engine's --ucx-devices"
        ) from error
    return arena

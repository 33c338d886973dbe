"""The client of `benchmarks.store`: a mapped one that attaches, matches and updates, and times its calls.

Knows the wire; not what is asked for, and why.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import grpc
from hotset.v1 import kvstore_pb2 as pb
from hotset.v1 import kvstore_pb2_grpc as pb_grpc

from services.contract.channel import CLIENT_OPTIONS
from services.contract.file_lock import FileLock
from services.contract.page_header import NO_PAGE
from services.contract.planes import Plane, PlaneLayer, planes_to_wire
from services.kvstore.page_refs import PageRef
from services.kvstore.seals import Seal

PLANES = (Plane("kv", (PlaneLayer(1, 1, 16),)),)


class Client:
    """A mapped client of the store."""

    def __init__(self, address: str, arena: Path) -> None:
        self._channel = grpc.insecure_channel(address, options=CLIENT_OPTIONS)
        self._stub = pb_grpc.KvStoreStub(self._channel)
        token = secrets.token_hex(16)
        self._lock = FileLock(arena.parent / "sessions" / f"{token}.lock")
        self._lock.acquire()
        self._session = self._stub.Attach(
            pb.AttachRequest(
                client_name="benchmark",
                kind=pb.CLIENT_KIND_MAPPED,
                model_fingerprint=bytes(32),
                page_tokens=64,
                planes=planes_to_wire(PLANES),
                session_token=token,
            )
        )
        self._sequence = 0

    def match(self, hashes: list[bytes]) -> tuple[list[PageRef], float]:
        """The pages found, and the seconds of the call."""
        request = pb.MatchRequest(
            session_id=self._session.session_id, epoch=self._session.epoch, page_hashes=hashes
        )
        start = time.perf_counter()
        reply = self._stub.Match(request, timeout=60)
        seconds = time.perf_counter() - start
        return _listed(reply.pages), seconds

    def update(self, releases: list[PageRef], seals: list[Seal], wanted: int) -> tuple[list[PageRef], float]:
        """The pages allocated, and the seconds of the call."""
        self._sequence += 1
        request = pb.UpdateRequest(
            session_id=self._session.session_id,
            epoch=self._session.epoch,
            sequence=self._sequence,
            releases=_wire(releases),
            seals=pb.Seals(
                pages=_wire([seal.page for seal in seals]),
                page_hashes=[seal.page_hash for seal in seals],
                parents=_wire([seal.parent or PageRef(NO_PAGE, 0) for seal in seals]),
            ),
            allocate_pages=wanted,
        )
        start = time.perf_counter()
        reply = self._stub.Update(request, timeout=60)
        seconds = time.perf_counter() - start
        if len(reply.pages.pages) != wanted:
            raise RuntimeError(f"the store is short of {reply.shortfall_pages} pages")
        return _listed(reply.pages), seconds

    def close(self) -> None:
        """End the session."""
        self._stub.Detach(
            pb.DetachRequest(session_id=self._session.session_id, epoch=self._session.epoch), timeout=60
        )
        self._lock.release()
        self._channel.close()


def _wire(pages: list[PageRef]) -> pb.PageRefs:
    return pb.PageRefs(pages=[page.page for page in pages], generations=[page.generation for page in pages])


def _listed(pages: pb.PageRefs) -> list[PageRef]:
    return list(map(PageRef, pages.pages, pages.generations))

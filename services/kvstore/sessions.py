"""Who is attached: names, epochs, leases, the last answer of each; and who must go.

Knows clients, no pages. Time is the monotonic clock given to it, in seconds.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from services.contract.errors import NotFound, StaleReference, StateConflict
from services.kvstore.orders import AttachOrder, ClientKind, Updated
from services.kvstore.session_locks import SessionLocks

Clock = Callable[[], float]


class SessionEnd(Enum):
    """Why a session is over."""

    DETACHED = "detached"
    LEASE = "lease"  # a remote client was silent for too long
    IDLE = "idle"  # so was a reader, which says nothing between two pulls and comes again for the next
    GONE = "gone"  # a mapped client's process is gone
    REPLACED = "replaced"  # the same remote client came with another token; or a reader's layout is gone


@dataclass(slots=True)
class Session:
    """One attached client."""

    session_id: int
    client_name: str
    kind: ClientKind
    token: str
    epoch: int
    deadline: float  # the lease ends then
    expired: bool = False  # a mapped client past its lease, whose process lives
    reads_only: bool = False  # another store; nobody waits for it to leave
    last_sequence: int = 0
    last_answer: Updated | None = None
    data_key: bytes = field(
        default_factory=lambda: secrets.token_bytes(16)
    )  # of this epoch's requests for bytes

    @property
    def lapse(self) -> SessionEnd:
        """Why it is over when its lease is; of a remote client."""
        return SessionEnd.IDLE if self.reads_only else SessionEnd.LEASE


def session_id_of(token: str) -> int:
    """The session's number, the same in every life of the store: never 0, 64 bits."""
    return int.from_bytes(hashlib.blake2b(token.encode(), digest_size=8).digest()) or 1


class Sessions:
    """The attached clients, by number and by name."""

    def __init__(self, locks: SessionLocks, clock: Clock, lease_seconds: float) -> None:
        self._locks = locks
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._by_id: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def working(self) -> int:
        """Attached clients that do more than read."""
        return sum(not session.reads_only for session in self._by_id.values())

    def count(self, kind: ClientKind) -> int:
        """Attached clients of `kind`."""
        return sum(session.kind is kind for session in self._by_id.values())

    def expired(self) -> int:
        """Mapped clients past their lease whose process lives."""
        return sum(session.expired for session in self._by_id.values())

    def numbers(self) -> set[int]:
        """The session numbers of the attached clients."""
        return set(self._by_id)

    def get(self, session_id: int) -> Session | None:
        """The session with this number."""
        return self._by_id.get(session_id)

    def in_the_way(self, order: AttachOrder, *, anew: bool) -> list[Session]:
        """Sessions that end if `order` is served: an older one of its client, readers of a layout that goes.

        Args:
            order: of a client that attaches.
            anew: the arena has to be laid out for it.

        Raises:
            StateConflict: the older one maps the arena, and its process lives.
        """
        session_id = session_id_of(order.token)
        found = []
        for session in self._by_id.values():
            older = session.client_name == order.client_name and session.session_id != session_id
            if older and session.kind is ClientKind.MAPPED:
                raise StateConflict(
                    f"client {order.client_name} is attached already and its process lives; "
                    "stop it first, or give this one another name (a decoder's follows its --port)"
                )
            if older or (anew and session.reads_only):
                found.append(session)
        return found

    def open(self, client_name: str, kind: ClientKind, token: str, epoch: int) -> Session:
        """Open the session that `token` stands for, or start a new epoch of it."""
        session = Session(session_id_of(token), client_name, kind, token, epoch, 0.0)
        self._by_id[session.session_id] = session
        self.renew(session)
        return session

    def check_identity(self, order: AttachOrder) -> None:
        """Refuse a client that comes with the token of another one.

        Raises:
            StateConflict: the token is attached under another name or kind.
        """
        session = self.get(session_id_of(order.token))
        if session is not None and (session.client_name, session.kind) != (order.client_name, order.kind):
            raise StateConflict(
                f"this token is attached as {session.kind.value} client {session.client_name}; "
                "every client chooses its own"
            )

    def authorise(self, session_id: int, epoch: int) -> Session:
        """The session that a call speaks for.

        Raises:
            NotFound: no such session, any more; StaleReference: another epoch of it.
        """
        session = self._by_id.get(session_id)
        if session is None:
            raise NotFound(f"session {session_id:016x} is not attached; attach again")
        if session.epoch != epoch:
            raise StaleReference(
                f"session {session_id:016x} is at epoch {session.epoch}, the call is of {epoch}"
            )
        return session

    def renew(self, session: Session) -> None:
        """Start the lease of `session` anew."""
        session.deadline = self._clock() + self._lease_seconds
        session.expired = False

    def remove(self, session: Session) -> None:
        """Forget `session`."""
        del self._by_id[session.session_id]

    def overdue(self) -> tuple[list[tuple[Session, SessionEnd]], list[Session]]:
        """Sessions that are over and why, and mapped ones that are past their lease since now.

        A mapped client past its lease may still be written to by its device, so only its lock tells.
        """
        now = self._clock()
        over: list[tuple[Session, SessionEnd]] = []
        silent: list[Session] = []
        for session in self._by_id.values():
            if session.kind is ClientKind.MAPPED and self._locks.reap(session.token):
                over.append((session, SessionEnd.GONE))
            elif now >= session.deadline and session.kind is ClientKind.REMOTE:
                over.append((session, session.lapse))
            elif now >= session.deadline and not session.expired:
                session.expired = True
                silent.append(session)
        return over, silent

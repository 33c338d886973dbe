"""Pages that a reopened arena holds for clients of an earlier life of the store, until they claim them.

Knows who is waited for; the table knows what for. Two kinds of survivors:

    a lock file that is held   a mapped client that lives: waited for as long as it lives
    none, but an open page     a remote client, perhaps: waited for until the grace period ends

Sealed pages do not say who held them, so all are kept until nobody is waited for: they can be matched at
once, and be evicted afterwards.
"""

from __future__ import annotations

from services.kvstore.pages import THE_PULLER, THE_STORE, PageTable
from services.kvstore.session_locks import SessionLocks
from services.kvstore.sessions import Clock, session_id_of


class Recovery:
    """Runs from the reopening of an arena until `tick` says that it is over."""

    def __init__(self, table: PageTable, locks: SessionLocks, clock: Clock, grace_seconds: float) -> None:
        """Give back at once what belonged to mapped clients that are gone."""
        self._table = table
        self._locks = locks
        self._clock = clock
        self._deadline = clock() + grace_seconds
        living, gone = locks.survey()
        self._living = {session_id_of(token): token for token in living}
        for token in gone:
            table.release_all(session_id_of(token))
        table.release_all(THE_PULLER)  # what had not arrived whole is nothing

    @property
    def living(self) -> int:
        """Mapped clients that live and have not attached yet."""
        return len(self._living)

    def claim(self, session_id: int) -> None:
        """The client of this session has attached."""
        self._living.pop(session_id, None)

    def tick(self, attached: set[int]) -> bool:
        """Give back the pages of clients that did not come; whether everything is claimed or given back.

        Args:
            attached: session numbers of the attached clients.
        """
        for session_id, token in list(self._living.items()):
            if self._locks.reap(token):
                del self._living[session_id]
                self._table.release_all(session_id)
        if self._clock() < self._deadline:
            return False
        expected = attached | self._living.keys() | {THE_STORE, THE_PULLER}
        for holder in self._table.holders():
            if holder not in expected:
                self._table.release_all(holder)
        if self._living:
            return False
        self._table.release_all(THE_STORE)
        return True

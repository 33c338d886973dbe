"""Random interleavings of clients, deaths, restarts and time, against a model of sets and counts.

The model knows who holds which page and nothing else; the store must agree after every step, in its own books
and in the file.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.contract.errors import InvalidRequest, NotFound, StateConflict
from services.kvstore.orders import ClientKind, PageRef, Seal
from tests.kvstore.world import LEASE_SECONDS, MAPPED, PAGE_COUNT, REMOTE, Client, World

NAMES = ("ann", "bob", "cid")
HASH = bytes(16)


def _number(ref: PageRef) -> int:
    return ref.page


class Modelled:
    """What the model knows of one attached client."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.open: set[PageRef] = set()
        self.sealed: set[PageRef] = set()
        self.deadline = 0.0
        self.must_attach = False  # the store was restarted since
        self.old_references: list[PageRef] = []

    @property
    def held(self) -> list[PageRef]:
        """Open ones first, in the order of their numbers, so that a run can be repeated."""
        return [*sorted(self.open, key=_number), *sorted(self.sealed, key=_number)]


class StoreMachine(RuleBasedStateMachine):
    """Each rule acts on the store and on the model."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="hotset-test-", dir="/dev/shm"))
        self.world = World(self.directory / "arena")
        self.clients: dict[str, Modelled] = {}
        self.seen: dict[int, int] = {}  # page -> greatest generation handed out

    def teardown(self) -> None:
        try:
            self.world.end()
        finally:
            shutil.rmtree(self.directory)

    @property
    def free(self) -> int:
        return PAGE_COUNT - sum(len(c.held) for c in self.clients.values())

    def spoke(self, modelled: Modelled) -> None:
        """A call renews the lease."""
        modelled.deadline = self.world.clock.now + LEASE_SECONDS

    def draw_client(self, data: st.DataObject) -> Modelled:
        return self.clients[data.draw(st.sampled_from(sorted(self.clients)))]

    def draw_attached(self, data: st.DataObject) -> Modelled:
        """A client of this life of the store, which is about to make a call."""
        modelled = self.clients[data.draw(st.sampled_from(self.attached))]
        self.spoke(modelled)
        return modelled

    @property
    def attached(self) -> list[str]:
        return sorted(name for name, modelled in self.clients.items() if not modelled.must_attach)

    @rule(name=st.sampled_from(NAMES), kind=st.sampled_from((MAPPED, REMOTE)))
    def attach_new(self, name: str, kind: ClientKind) -> None:
        """Another process under this name: let in if there is none, or a remote one, which it replaces."""
        old = self.clients.get(name)
        if old is not None and old.must_attach:
            return
        client = self.world.client(name, kind)
        if old is not None and old.client.kind is MAPPED:
            with pytest.raises(StateConflict, match="its process lives"):
                client.attach()
            client.lock.release()
            return
        client.attach()
        self.clients[name] = Modelled(client)
        self.spoke(self.clients[name])

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), dropping=st.integers(0, 3))
    def attach_again(self, data: st.DataObject, dropping: int) -> None:
        modelled = self.draw_client(data)
        keep = modelled.held[dropping:]
        attached = modelled.client.attach(held=keep)
        modelled.must_attach = False
        modelled.open &= set(keep)
        modelled.sealed &= set(keep)
        assert set(attached.sealed) == modelled.sealed
        self.spoke(modelled)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def claim_too_much(self, data: st.DataObject) -> None:
        """Pages that another client writes cannot be claimed, whatever life of the store they are from."""
        modelled = self.draw_client(data)
        others = [ref for other in self.clients.values() if other is not modelled for ref in other.open]
        if others:
            with pytest.raises(StateConflict):
                modelled.client.attach(held=[*modelled.held, others[0]])

    @precondition(lambda self: self.attached)
    @rule(data=st.data(), count=st.sampled_from([0, 1, 1, 2, 3, PAGE_COUNT // 2, PAGE_COUNT]))
    def allocate(self, data: st.DataObject, count: int) -> None:
        modelled = self.draw_attached(data)
        free = self.world.count("free")
        updated = modelled.client.update(count)
        assert len(updated.pages) == (count if count <= free else 0)
        assert updated.shortfall_pages == max(0, count - free)
        for ref in updated.pages:
            assert ref.generation > self.seen.get(ref.page, 0)
            self.seen[ref.page] = ref.generation
        modelled.open |= set(updated.pages)

    @precondition(lambda self: any(self.clients[name].held for name in self.attached))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        modelled = self.draw_attached(data)
        some = {ref for ref in modelled.held if data.draw(st.booleans())}
        modelled.client.update(releases=list(some))
        modelled.open -= some
        modelled.sealed -= some
        modelled.old_references += some

    @precondition(lambda self: any(self.clients[name].open for name in self.attached))
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        modelled = self.draw_attached(data)
        if modelled.open:
            page = data.draw(st.sampled_from(modelled.held[: len(modelled.open)]))
            parent = data.draw(st.sampled_from([None, *modelled.held[len(modelled.open) :]]))
            modelled.client.update(seals=[Seal(page, HASH, parent)])
            modelled.open.remove(page)
            modelled.sealed.add(page)

    @precondition(lambda self: self.attached)
    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        """References that are old, doubled, another's or made up, beside good orders: nothing changes."""
        modelled = self.draw_attached(data)
        good = modelled.held[:1]
        theirs = [ref for other in self.clients.values() if other is not modelled for ref in other.held]
        made_up = [PageRef(PAGE_COUNT, 1), PageRef(0, 2**32 - 1)]
        bad = data.draw(st.sampled_from([*good, *modelled.old_references, *theirs, *made_up]))
        releases, seals = data.draw(
            st.sampled_from([([*good, bad], []), (good, [Seal(bad, HASH, None)])])
            if good
            else st.just(([bad], []))
        )
        with pytest.raises((InvalidRequest, StateConflict)):
            modelled.client.update(1, releases=releases, seals=seals)

    @precondition(lambda self: self.attached)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        modelled = self.draw_attached(data)
        assert modelled.client.detach() == len(modelled.held)
        modelled.client.lock.release()
        del self.clients[modelled.client.name]

    @precondition(lambda self: any(c.client.kind is MAPPED for c in self.clients.values()))
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        modelled = self.draw_client(data)
        if modelled.client.kind is MAPPED:
            modelled.client.die()
            self.world.pass_time(0)
            del self.clients[modelled.client.name]

    @precondition(lambda self: len(self.attached) < len(self.clients))
    @rule()
    def speak_after_a_restart(self) -> None:
        for modelled in self.clients.values():
            if modelled.must_attach:
                with pytest.raises(NotFound):
                    modelled.client.update(1)

    @rule(seconds=st.sampled_from([LEASE_SECONDS / 2, LEASE_SECONDS, LEASE_SECONDS * 2]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)
        for name, modelled in list(self.clients.items()):
            if modelled.client.kind is REMOTE and self.world.clock.now >= modelled.deadline:
                del self.clients[name]

    @precondition(lambda self: self.clients)
    @rule()
    def restart(self) -> None:
        self.world.restart()
        for modelled in self.clients.values():
            modelled.must_attach = True
            modelled.deadline = self.world.clock.now + LEASE_SECONDS

    @invariant()
    def every_held_page_is_kept(self) -> None:
        """The store may keep more for a while (a restart's claims), never less."""
        held = sum(len(c.held) for c in self.clients.values())
        if self.world.count("total"):
            assert held <= PAGE_COUNT - self.world.count("free")
            assert sum(len(c.open) for c in self.clients.values()) <= self.world.count("open")

    @invariant()
    def nothing_leaks(self) -> None:
        """Once no client has yet to come back and the grace is over, the books agree to the page."""
        if self.world.count("total") and not self.world.store.snapshot().recovering:
            assert self.free == self.world.count("free")
            assert sum(len(c.open) for c in self.clients.values()) == self.world.count("open")
            assert self.world.count("cached") == 0


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

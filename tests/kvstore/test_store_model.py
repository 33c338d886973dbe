"""Random interleavings of clients, matches, evictions, deaths, restarts and time, against a model.

The store must agree with page_model.py after every step, in its own books and in the file: which pages are
sealed under which hash says exactly which were evicted.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.contract.errors import InvalidRequest, NotFound, StateConflict
from services.contract.page_header import PageState
from services.kvstore.orders import ClientKind
from services.kvstore.page_refs import PageRef
from services.kvstore.seals import Seal
from tests.kvstore.page_model import RESTARTED, PageModel
from tests.kvstore.world import LEASE_SECONDS, MAPPED, PAGE_COUNT, REMOTE, Client, World

NAMES = ("ann", "bob", "cid")
LETTERS = st.sampled_from("ab")  # few, so that sequences often share what they begin with


def chained(parent: bytes, letter: str) -> bytes:
    return hashlib.blake2b(parent + letter.encode(), digest_size=16).digest()


def chain(letters: str) -> list[bytes]:
    hashes, page_hash = [], b""
    for letter in letters:
        page_hash = chained(page_hash, letter)
        hashes.append(page_hash)
    return hashes


class Modelled:
    """What the model knows of one attached client."""

    def __init__(self, client: Client, pages: PageModel) -> None:
        self.client = client
        self.name = client.token  # of the process: a successor under the same name has another
        self.pages = pages
        self.deadline = 0.0
        self.must_attach = False  # the store was restarted since
        self.expected: Counter[PageRef] = Counter()  # what it will claim then
        self.old_references: list[PageRef] = []

    @property
    def held(self) -> list[PageRef]:
        """One item a reference; open ones first, in the order of their numbers, so that a run can repeat."""
        owned = self.expected if self.must_attach else self.pages.holds(self.name)
        return sorted(owned.elements(), key=lambda ref: (ref not in self.pages.open, ref.page))

    @property
    def open(self) -> list[PageRef]:
        return [ref for ref in self.held if ref in self.pages.open]

    @property
    def sealed(self) -> list[PageRef]:
        return [ref for ref in self.held if ref not in self.pages.open]


class StoreMachine(RuleBasedStateMachine):
    """Each rule acts on the store and on the model."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="hotset-test-", dir="/dev/shm"))
        self.world = World(self.directory / "arena")
        self.pages = PageModel(PAGE_COUNT)
        self.clients: dict[str, Modelled] = {}
        self.seen: dict[int, int] = {}  # page -> greatest generation handed out

    def teardown(self) -> None:
        try:
            self.world.end()
        finally:
            shutil.rmtree(self.directory)

    def spoke(self, modelled: Modelled) -> None:
        """A call renews the lease."""
        modelled.deadline = self.world.clock.now + LEASE_SECONDS

    def forget(self, modelled: Modelled) -> None:
        self.pages.drop_all(modelled.name)
        del self.clients[modelled.client.name]

    def settle(self) -> None:
        """The store looked around: the claims of a restart may be over now."""
        if RESTARTED in self.pages.held and not self.world.store.snapshot().recovering:
            self.pages.drop_all(RESTARTED)

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
        self.settle()
        if old is not None:
            self.forget(old)
        self.clients[name] = Modelled(client, self.pages)
        self.spoke(self.clients[name])

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), dropping=st.integers(0, 3))
    def attach_again(self, data: st.DataObject, dropping: int) -> None:
        modelled = self.draw_client(data)
        keep = Counter(modelled.held[dropping:])
        attached = modelled.client.attach(held=list(keep.elements()))
        self.settle()
        modelled.must_attach = False
        owned = self.pages.holds(modelled.name)
        dropped = owned - keep
        owned |= keep
        self.pages.drop(modelled.name, dropped)
        assert set(attached.sealed) == set(modelled.sealed)
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
            self.settle()

    @precondition(lambda self: self.attached)
    @rule(data=st.data(), count=st.sampled_from([0, 1, 1, 2, 3, PAGE_COUNT // 2, PAGE_COUNT]))
    def allocate(self, data: st.DataObject, count: int) -> None:
        modelled = self.draw_attached(data)
        room = self.pages.free + len(self.pages.stale)
        served = self.pages.allocate(modelled.name, count)
        updated = modelled.client.update(count)
        assert len(updated.pages) == (count if served else 0)
        assert updated.shortfall_pages == max(0, count - room)
        for ref in updated.pages:
            assert ref.generation > self.seen.get(ref.page, 0)
            self.seen[ref.page] = ref.generation
        self.pages.take(modelled.name, updated.pages)
        assert (updated.free_pages, updated.cached_pages) == (self.pages.free, len(self.pages.stale))

    @precondition(lambda self: any(self.clients[name].held for name in self.attached))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        modelled = self.draw_attached(data)
        some = [ref for ref in modelled.held if data.draw(st.booleans())]
        modelled.client.update(releases=some)
        self.pages.drop(modelled.name, Counter(some))
        modelled.old_references += some

    @precondition(lambda self: any(self.clients[name].open for name in self.attached))
    @rule(data=st.data(), letters=st.lists(LETTERS, min_size=1, max_size=4))
    def seal(self, data: st.DataObject, letters: list[str]) -> None:
        """A run of pages behind a page that is sealed already, or from the start."""
        modelled = self.draw_attached(data)
        parent = data.draw(st.sampled_from([None, *modelled.sealed]))
        page_hash = b"" if parent is None else self.pages.sealed[parent].page_hash
        seals = []
        for ref, letter in zip(modelled.open, letters, strict=False):
            page_hash = chained(page_hash, letter)
            seals.append(Seal(ref, page_hash, parent))
            parent = ref
        modelled.client.update(seals=seals)
        for seal in seals:
            self.pages.seal(*seal[:3])

    @precondition(lambda self: self.attached)
    @rule(data=st.data(), letters=st.text("ab", max_size=5), renew=st.booleans())
    def match(self, data: st.DataObject, letters: str, renew: bool) -> None:
        modelled = self.draw_attached(data)
        pages = list(modelled.client.match(*chain(letters)))
        assert pages == self.pages.match(modelled.name, chain(letters))
        if renew and pages:  # used again: the most recent of all
            modelled.client.update(releases=pages)
            self.pages.drop(modelled.name, Counter(pages))

    @precondition(lambda self: self.attached)
    @rule(data=st.data(), letters=st.text("ab", min_size=1, max_size=5), parting=st.integers(0, 5))
    def serve(self, data: st.DataObject, letters: str, parting: int) -> None:
        """A whole request: match, allocate the rest, seal it, and release all, in one call or in two."""
        modelled = self.draw_attached(data)
        client, hashes = modelled.client, chain(letters)
        pages = list(client.match(*hashes))
        assert pages == self.pages.match(modelled.name, hashes)
        rest = hashes[len(pages) :]
        if self.pages.allocate(modelled.name, len(rest)):
            for page, page_hash in zip(client.allocate(len(rest)), rest, strict=True):
                self.seen[page.page] = page.generation
                parent = pages[-1] if pages else None
                self.pages.take(modelled.name, [page])
                client.update(seals=[Seal(page, page_hash, parent)])
                self.pages.seal(page, page_hash, parent)
                pages.append(page)
        else:
            assert client.allocate(len(rest)) == ()
        for some in (pages[parting:], pages[:parting]):
            client.update(releases=some)
            self.pages.drop(modelled.name, Counter(some))

    @precondition(lambda self: self.attached)
    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        """References that are old, another's, made up or one too many, beside good orders: all refused."""
        modelled = self.draw_attached(data)
        mine = Counter(modelled.held)
        good = modelled.held[:1]
        others = [ref for other in self.clients.values() if other is not modelled for ref in other.held]
        bad = [ref for ref in [*modelled.old_references, *others] if ref not in mine]
        ref = data.draw(st.sampled_from([*bad, PageRef(PAGE_COUNT, 1), PageRef(0, 2**32 - 1)]))
        too_many = [*good, *[good[0]] * mine[good[0]]] if good else [ref]
        for releases, seals in (([*good, ref], []), (good, [Seal(ref, bytes(16), None)]), (too_many, [])):
            with pytest.raises((InvalidRequest, StateConflict)):
                modelled.client.update(1, releases=releases, seals=seals)

    @precondition(lambda self: self.attached)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        modelled = self.draw_attached(data)
        assert modelled.client.detach() == len(modelled.held)
        modelled.client.lock.release()
        self.forget(modelled)

    @precondition(lambda self: any(c.client.kind is MAPPED for c in self.clients.values()))
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        modelled = self.draw_client(data)
        if modelled.client.kind is MAPPED:
            modelled.client.die()
            self.world.pass_time(0)
            self.forget(modelled)
            self.settle()

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
        for modelled in list(self.clients.values()):
            if modelled.client.kind is REMOTE and self.world.clock.now >= modelled.deadline:
                self.forget(modelled)
        self.settle()

    @rule()
    def restart(self) -> None:
        if not self.world.count("total"):
            return
        for modelled in self.clients.values():
            modelled.expected = Counter(modelled.held)
            modelled.must_attach = True
            modelled.deadline = self.world.clock.now + LEASE_SECONDS
        self.world.restart()
        self.pages.restart()

    @invariant()
    def the_books_agree(self) -> None:
        if self.world.count("total"):
            counts = self.world.store.snapshot().pages
            assert (counts.free, counts.cached) == (self.pages.free, len(self.pages.stale))
            assert counts.open == len(self.pages.open)

    @invariant()
    def the_file_agrees(self) -> None:
        if self.world.count("total"):
            headers = self.world.headers()
            sealed = {
                PageRef(page, int(header["generation"])): header["hash"].tobytes()[: header["hash_bytes"]]
                for page, header in enumerate(headers)
                if header["state"] == PageState.SEALED
            }
            assert sealed == {ref: page.page_hash for ref, page in self.pages.sealed.items()}

    @invariant()
    def what_a_client_counts_on_is_there(self) -> None:
        for modelled in self.clients.values():
            for ref in modelled.held:
                assert ref in self.pages.open or ref in self.pages.sealed


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

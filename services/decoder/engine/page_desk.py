"""The scheduler's dealings with the store: what goes back, is sealed, is wanted, is there already.

Knows pages, and of sequences what their pages hold; not who runs. Everything but a match waits for the one
exchange of the next step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from services.contract.errors import Unavailable
from services.decoder.engine.host_pages import HostPage, HostPages, SealOrder
from services.decoder.engine.page_hash import PageHasher
from services.decoder.engine.sequence import Sequence
from services.decoder.engine.step_plan import Chunk

MOST_GIVEN, FEW_GIVEN = 512, 64
"""Pages that go back in the exchange of a step that others wait for; few, if it lets somebody in as well."""


class PageDesk:
    """Without a hasher no prefix is looked for, and none is left behind."""

    def __init__(self, host: HostPages, hasher: PageHasher | None, page_tokens: int) -> None:
        self._host = host
        self._hasher = hasher
        self._page_tokens = page_tokens
        self.prompts_sealed = 0  # pages so far
        self._references: Counter[HostPage] = Counter()  # of sequences: a found page may have several
        self._given_up: Counter[HostPage] = Counter()  # references, in the order in which they were
        self._unheld: set[HostPage] = set()  # of these, pages that no sequence here has
        self._seals: list[SealOrder] = []

    @property
    def total(self) -> int:
        """Pages of the arena."""
        return self._host.total

    @property
    def free(self) -> int:
        """Pages that the next exchange can get, as far as known; what it seals comes free one later."""
        if not self._unheld:
            return self._host.free
        return self._host.free + len(self._unheld) - len(self._unheld & self._busy())

    @property
    def gives_back(self) -> bool:
        """Whether pages wait to go back."""
        return bool(self._given_up)

    @property
    def has_work(self) -> bool:
        """Whether an exchange would do anything."""
        return bool(self._given_up or self._seals)

    @property
    def shares(self) -> bool:
        """Whether what one sequence computes may be found by another."""
        return self._hasher is not None

    @property
    def has_seals(self) -> bool:
        """Whether pages are about to be sealed, that a match does not find yet."""
        return bool(self._seals)

    def give(self, pages: list[HostPage]) -> int:
        """Give pages up; their owner may not write them any more. How many nobody else here holds."""
        references, unheld = self._references, []
        for page in pages:  # those alone: a session has a hundred times as many
            if references[page] > 1:
                references[page] -= 1
            else:
                del references[page]
                unheld.append(page)
        self._given_up.update(pages)
        self._unheld.update(unheld)
        return len(unheld)

    def most_found(self, sequence: Sequence) -> int:
        """Pages of a prompt, and of an answer to be replayed, that a match could find.

        A prompt's last token is left to be computed, an answer's last one to be taken: it may be the end.
        """
        if self._hasher is None or sequence.sampling.prompt_logprobs:
            return 0
        return (len(sequence.prompt) + max(0, len(sequence.known) - 1) - 1) // self._page_tokens

    def hash_pages(self, sequence: Sequence) -> None:
        """Hash what a match will ask for; nothing but the sequence is touched."""
        if self._hasher is not None:
            self._hasher.extend(sequence, self.most_found(sequence))

    def match(self, sequence: Sequence) -> list[HostPage]:
        """Take those of them that are in the store."""
        most = self.most_found(sequence)
        if self._hasher is None or not most:
            return []
        try:
            pages = self._host.match(self._hasher.extend(sequence, most), sequence.prompt)
        except Unavailable:
            return []  # then it is computed
        self._references.update(pages)
        self._unheld.difference_update(pages)
        return pages

    def seal_full_pages(self, sequence: Sequence) -> None:
        """What is computed never changes again, so that others may find it."""
        full = sequence.computed // self._page_tokens
        if self._hasher is None or full <= sequence.sealed:
            return
        hashes, size = self._hasher.extend(sequence, full), self._page_tokens
        for index in range(sequence.sealed, full):
            parent = sequence.host_pages[index - 1] if index else None
            # What was decoded is found by a replay only, never by a prompt: its tokens would mislead.
            prompt = sequence.prompt[index * size : (index + 1) * size]
            tokens = prompt if len(prompt) == size else ()
            self._seals.append(SealOrder(sequence.host_pages[index], hashes[index], parent, tokens))
        self.prompts_sealed += max(0, min(full, len(sequence.prompt) // self._page_tokens) - sequence.sealed)
        sequence.sealed = full

    def will_find(self, waiting: Sequence, chunk: Chunk) -> bool:
        """Whether a match for one that waits would find more once a running chunk's pages are sealed."""
        first, size = chunk.sequence.sealed, self._page_tokens
        most = min(chunk.end, len(waiting.prompt) - 1) // size
        if self._hasher is None or most <= first or waiting.sampling.prompt_logprobs:
            return False
        mine, theirs = (self._hasher.extend(one, first + 1)[first] for one in (waiting, chunk.sequence))
        return mine == theirs

    def exchange(self, want: int, most: int | None = None) -> list[HostPage] | None:
        """One call for all rows, None if there are too few; what it seals goes back with the next.

        No more than `most` pages go back, or as many as make the room: a step that others wait for gives a
        long sequence's back by and by, the last ones first, as they shall go stale.

        Raises:
            Unavailable: as HostPages says.
        """
        if not (want or self.has_work):
            return []
        going = self._going(want - self._host.free, most)
        give = [page for page in reversed(going) for _ in range(self._given_up[page])]
        pages = self._host.exchange(give, want, self._seals)
        for page in going:
            del self._given_up[page]
        self._unheld.difference_update(going)
        self._seals = []
        self._references.update(pages or ())
        return pages

    def _going(self, short: int, most: int | None) -> list[HostPage]:
        """Pages that go back now, the last first: `most`, and more until `short` of them come free."""
        busy, going = self._busy(), list[HostPage]()
        for page in reversed(self._given_up):
            if most is not None and len(going) >= most and short <= 0:
                break
            if page not in busy:
                going.append(page)
                short -= page in self._unheld
        return going

    def look(self) -> None:
        """Learn how much is free now.

        Raises:
            Unavailable: as HostPages says.
        """
        self._host.match([])

    def check_integrity(self, held: Iterable[HostPage]) -> None:
        """Raise AssertionError unless sequences hold, all together, the pages that the store gave."""
        assert Counter(held) == self._references, "host pages lost or owned twice"
        if not self.has_work:
            assert self._host.lent == self._references.total(), "the session holds other host pages"

    def _busy(self) -> set[HostPage]:
        """Pages that the next exchange seals, and therefore does not give back."""
        return {page for seal in self._seals for page in (seal.page, seal.parent) if page is not None}

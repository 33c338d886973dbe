"""Hashes that name pages by what was computed in them: a chain over token ids, salted.

Knows tokens; neither pages nor the store. Two pages have the same hash only if every token up to the page's
end, the model and its KV's layout, the tenant and the way it was computed are the same. A prompt's tokens are
prefilled densely, an answer's are decoded sparsely, so their KV differs: the hash of a page that holds
generated tokens also covers where the answer began and what chose the blocks (DESIGN section 6, Replay).
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass

from services.decoder.engine.sequence import Sequence

_BYTES = 16


@dataclass(frozen=True, slots=True)
class PageHasher:
    """Of one engine: what its KV means, and how its answers are decoded."""

    fingerprint: bytes  # of weights, dtype and layout
    decoding: bytes  # of selector, budget and whatever else an answer's KV depends on
    page_tokens: int

    def extend(self, sequence: Sequence, pages: int) -> list[bytes]:
        """The hashes of the first `pages` pages of a sequence, all of them full; kept with the sequence."""
        size, begins = self.page_tokens, len(sequence.prompt)
        hashes = sequence.page_hashes
        if len(hashes) >= pages:
            return hashes[:pages]
        first, whole = len(hashes), min(pages, begins // size)
        prompt = array("I", sequence.prompt[first * size : whole * size]).tobytes()
        for start in range(0, len(prompt), 4 * size):
            hashes.append(_digest(self._parent(sequence), prompt[start : start + 4 * size], b""))
        answer = max(sequence.generated, sequence.known, key=len)  # one begins with the other
        for index in range(len(hashes), pages):
            start, end = index * size, (index + 1) * size
            tokens = list(sequence.prompt[start:end])
            tokens += answer[max(0, start - begins) : max(0, end - begins)]
            assert len(tokens) == size, "only full pages have a hash"
            how = self.decoding + begins.to_bytes(8, "little") if end > begins else b""
            hashes.append(_digest(self._parent(sequence), array("I", tokens).tobytes(), how))
        return hashes[:pages]

    def _parent(self, sequence: Sequence) -> bytes:
        hashes = sequence.page_hashes
        return hashes[-1] if hashes else _digest(self.fingerprint, sequence.salt)


def _digest(*parts: bytes) -> bytes:
    """Of the parts and of where each ends."""
    told = b"".join([piece for part in parts for piece in (len(part).to_bytes(8, "little"), part)])
    return hashlib.blake2b(told, digest_size=_BYTES).digest()

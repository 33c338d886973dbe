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
        answer = max(sequence.generated, sequence.known, key=len)  # one begins with the other
        hashes = sequence.page_hashes
        for index in range(len(hashes), pages):
            start, end = index * size, (index + 1) * size
            tokens = sequence.prompt[start:end]
            tokens += answer[max(0, start - begins) : max(0, end - begins)]
            assert len(tokens) == size, "only full pages have a hash"
            how = self.decoding + begins.to_bytes(8, "little") if end > begins else b""
            parent = hashes[-1] if hashes else _digest(self.fingerprint, sequence.salt)
            hashes.append(_digest(parent, array("I", tokens).tobytes(), how))
        return hashes[:pages]


def _digest(*parts: bytes) -> bytes:
    """Of the parts and of where each ends."""
    digest = hashlib.blake2b(digest_size=_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()

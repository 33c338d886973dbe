"""What a client says that it holds, where one message cannot take it all: parts, until the last one has come.

Knows references and tokens; what a claim is worth, the table says. Parts that nothing follows are forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from services.contract.errors import Unavailable
from services.kvstore.page_refs import PageRefs


@dataclass(slots=True)
class _Claim:
    deadline: float
    count: int = 0  # references so far
    parts: list[PageRefs] = field(default_factory=list)


class HeldParts:
    """Of all clients that are taking up a session; of one event loop."""

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        """Parts that nothing follows for `seconds` of `clock` are forgotten."""
        self._clock = clock
        self._seconds = seconds
        self._claims: dict[str, _Claim] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def add(self, token: str, held: PageRefs, before: int) -> None:
        """Keep a part that others follow. `before` are the references of earlier ones, 0 begins anew.

        Raises:
            Unavailable: earlier parts are not here; they came to an earlier life of it, or too long ago.
        """
        claim = self._after(token, before)
        claim.parts.append(held)
        claim.count += len(held)
        claim.deadline = self._clock() + self._seconds
        self._claims[token] = claim

    def whole(self, token: str, held: PageRefs, before: int) -> PageRefs:
        """All that was claimed, with the last part.

        Raises:
            Unavailable: as `add`.
        """
        parts = [*self._after(token, before).parts, held]
        return PageRefs(
            np.concatenate([part.pages for part in parts]),
            np.concatenate([part.generations for part in parts]),
        )

    def _after(self, token: str, before: int) -> _Claim:
        """What has come of this client's claim, which is no longer kept."""
        now = self._clock()
        self._claims = {token: claim for token, claim in self._claims.items() if claim.deadline > now}
        claim = self._claims.pop(token, None)
        if not before or claim is None:
            claim = _Claim(now)
        if claim.count != before:
            raise Unavailable(
                f"{claim.count} of the {before} pages named earlier are known here; attach again, from the "
                "first part"
            )
        return claim

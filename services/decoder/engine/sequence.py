"""A sequence: one choice of a request, from its submission to its end.

Knows tokens and counts; no tensors. The scheduler alone changes where it stands.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from services.decoder.engine.host_pages import HostPage
from services.decoder.engine.room import Chances

TokenIds: TypeAlias = abc.Sequence[int]
"""Many of them are best an array: Python's collector goes through every list, whatever is in it."""


class Finish(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    NO_ROOM = "no room"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; fields as engine.proto's SamplingParams explains them."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False

    @property
    def wants_logprobs(self) -> bool:
        """Whether any log probability is to be told."""
        return self.logprobs or self.prompt_logprobs

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token of the unchanged logits is the answer."""
        return (
            self.temperature == 0
            and not self.logit_bias
            and self.frequency_penalty == 0
            and self.presence_penalty == 0
            and self.repetition_penalty == 1
        )


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token and, where asked for, its log probability and those of the likeliest."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """What the client asked, and how far it is."""

    request_id: str
    choice: int
    prompt: TokenIds
    sampling: Sampling
    seed: int
    max_tokens: int
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    known: list[int] = field(default_factory=list)  # tokens this choice must begin with: replayed, not drawn
    salt: bytes = b""  # of the tenant: prefixes are shared inside one only
    arrival: int = 0  # set by the scheduler; earlier is older
    submitted: float = 0.0  # set by the loop: seconds of its clock

    generated: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose KV is written
    cached: int = 0  # prompt tokens that were found in the store at first, before it had computed any
    sealed: int = 0  # pages that are sealed, or about to be
    named: int = 0  # of these, pages whose device pages others may share
    page_hashes: list[bytes] = field(default_factory=list)  # of full pages, as far as they were asked for
    row: int | None = None
    host_pages: list[HostPage] = field(default_factory=list)
    device_pages: list[int] = field(default_factory=list)
    laid_pages: list[int] = field(default_factory=list)  # device pages of what was found
    has_run: bool = False  # whether it has had a row
    sheltered_until: int = 0  # computed tokens before which a resumed one is not made to wait again
    refused: Chances | None = None  # what there was when it got no row
    passed: int = 0  # choices behind it in the queue that got a row before it
    reported: int = 0  # generated tokens that the client has seen
    prompt_logprobs: list[SampledToken] = field(default_factory=list)
    finish: Finish | None = None
    error: str = ""

    @property
    def length(self) -> int:
        """Tokens so far: prompt and answer."""
        return len(self.prompt) + len(self.generated)

    @property
    def reach(self) -> int:
        """Tokens that it may come to: prompt and longest answer."""
        return len(self.prompt) + self.max_tokens

    @property
    def places(self) -> list[int]:
        """All its device pages."""
        return [*self.device_pages, *self.laid_pages]

    @property
    def is_prefilling(self) -> bool:
        """Whether a part of the prompt is still to be computed."""
        return self.computed < len(self.prompt)

    @property
    def is_parked(self) -> bool:
        """Whether it waits for a row with all that it has computed in host pages."""
        return self.row is None and bool(self.host_pages)

    @property
    def is_sheltered(self) -> bool:
        """Whether it was resumed so lately that others should rather be made to wait."""
        return self.computed < self.sheltered_until

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: lower is more urgent, then older."""
        return self.priority, self.arrival

    def take(self, token: int) -> None:
        """Add the next token of the answer and see whether it is the last."""
        self.generated.append(token)
        if token in self.stop_ids and len(self.generated) > self.min_tokens:
            self.finish = Finish.STOP
        elif len(self.generated) >= self.max_tokens:
            self.finish = Finish.LENGTH

    @property
    def admission_tokens(self) -> int:
        """What a sequence starts with room for: all it must compute before its first new token, and that one
        if there is to be any. Never more than `Limits.check_possible` counted.
        """
        return len(self.prompt) + min(max(len(self.known), len(self.generated)) + 1, self.max_tokens)

    def book(self, token: SampledToken | None) -> list[SampledToken]:
        """Take a drawn token, None if the logits were no numbers; what of it is new to the client."""
        if token is None:
            self.finish, self.error = Finish.ERROR, "the model's output is not a number"
        elif self.max_tokens == 0:
            self.finish = Finish.LENGTH
        else:
            self.take(token.token)
            if len(self.generated) > self.reported:
                self.reported += 1
                return [token]
        return []

    def find(self, tokens: int) -> None:
        """Begin behind `tokens` tokens whose KV was found: fewer than are known, and none is computed yet."""
        begins = len(self.prompt)
        self.computed = tokens
        if not self.has_run:
            self.cached = min(tokens, begins)
        if tokens >= begins:
            self.generated = self.known[: tokens - begins + 1]

    def next_known(self, ahead: int = 0) -> int | None:
        """The token that must come next, if the answer is being replayed; `ahead`: that many tokens later."""
        at = len(self.generated) + ahead
        return self.known[at] if at < len(self.known) else None

    def rewind(self) -> None:
        """Forget all computed KV; what was generated will be replayed, token by token."""
        self.known = self.generated + self.known[len(self.generated) :]
        self.generated = []
        self.computed = self.sealed = 0
        if not self.has_run:
            self.cached = 0
        self.prompt_logprobs = []

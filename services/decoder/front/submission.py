"""One prompt at the engine, through the engine's lives: what was asked, and what each choice answered so far.

Knows the wire's messages; no mailbox, no text and no HTTP beside the errors it raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from hotset.v1 import engine_pb2

from services.contract.errors import HotsetError, InvalidRequest, NoRoom, StateConflict
from services.decoder.front.errors import (
    ApiError,
    BadRequest,
    EngineLost,
    InternalFault,
    Overloaded,
    RequestEndsEngines,
    ShuttingDown,
)

MOST_RUNS_LOST = 2
"""Engine deaths during which a request may have had a row; then it is taken to be their cause."""
MOST_DEATHS = 5
"""Engine deaths that a request lives through in the queue."""


class Submission:
    """Whoever owns it tells it every token, every end, and every death of the engine."""

    def __init__(self, request: engine_pb2.SubmitRequest) -> None:
        """Begin with what no engine has answered yet."""
        self._request = request
        self._answered: dict[int, list[int]] = {choice.index: [] for choice in request.choices}
        self._deaths = self._runs_lost = 0
        self._told = self._told_before = False
        self._first = request.choices[0].index

    @property
    def request_id(self) -> str:
        """The same in every life."""
        return self._request.request_id

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self._request.prompt_tokens)

    @property
    def open_choices(self) -> Set[int]:
        """Those that have not ended."""
        return self._answered.keys()

    def take(self, event: engine_pb2.TokenEvent) -> int:
        """Remember an event's tokens; returns prompt tokens newly known to have come from the cache.

        The choices of a prompt share it, so only the first one counts: the others find what that one has just
        computed. And what a later life finds of a request that was already being answered is no merit of the
        cache.
        """
        self._told = True
        if event.choice in self._answered:
            self._answered[event.choice] += [token.id for token in event.tokens]
        counts = event.choice == self._first and not self._told_before
        return event.cached_prompt_tokens if counts else 0

    def end(self, choice: int) -> None:
        """A choice needs no engine any more."""
        self._answered.pop(choice, None)

    def outlive(self, *, ran: bool) -> None:
        """The engine died; see whether another one may be tried.

        Args:
            ran: whether this request may have had a row.

        Raises:
            RequestEndsEngines: it ran in too many engines that died.
            EngineLost: it waited in too many.
        """
        self._deaths += 1
        self._runs_lost += ran
        self._told_before = self._told
        if self._runs_lost >= MOST_RUNS_LOST:
            raise RequestEndsEngines(
                f"the engine died {self._runs_lost} times while it worked on this request, which may be the "
                "cause; it is not tried again"
            )
        if self._deaths >= MOST_DEATHS:
            raise EngineLost(
                f"the engine died {self._deaths} times while this request waited; send it again later"
            )

    def to_submit(self) -> engine_pb2.SubmitRequest:
        """For a fresh engine: the choices that are open, each with the tokens that the client has."""
        rest = engine_pb2.SubmitRequest()
        rest.CopyFrom(self._request)
        del rest.choices[:]
        rest.choices.extend(
            engine_pb2.Choice(
                index=choice.index, seed=choice.seed, generated_tokens=self._answered[choice.index]
            )
            for choice in self._request.choices
            if choice.index in self._answered
        )
        return rest


def open_choices(submissions: Iterable[Submission]) -> int:
    """How many there are."""
    return sum(len(submission.open_choices) for submission in submissions)


def refusal(error: HotsetError) -> ApiError:
    """The engine's refusal of a submission, as the client is told."""
    match error:
        case InvalidRequest():
            return BadRequest(str(error))
        case NoRoom():
            return Overloaded(f"the server is full: {error}")
        case StateConflict():
            return ShuttingDown(f"the engine takes nothing new: {error}")
        case _ if type(error) is HotsetError:
            return InternalFault(f"the engine failed on this request: {error}")
        case _:
            return EngineLost(f"the engine could not be reached: {error}; send the request again")

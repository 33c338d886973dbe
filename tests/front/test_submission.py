"""What is remembered of a request through the engine's lives, and who may have run in one that died."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hotset.v1 import engine_pb2

from services.decoder.front.errors import EngineLost, RequestEndsEngines
from services.decoder.front.in_flight import InFlight
from services.decoder.front.submission import MOST_DEATHS, MOST_RUNS_LOST, Submission


def _submission() -> Submission:
    choices = [engine_pb2.Choice(index=index, seed=10 + index) for index in range(3)]
    return Submission(
        engine_pb2.SubmitRequest(
            request_id="r", prompt_tokens=[1, 2, 3], choices=choices, max_tokens=9, min_tokens=2, priority=-1
        )
    )


def _told(choice: int, *tokens: int, cached: int = 0) -> engine_pb2.TokenEvent:
    return engine_pb2.TokenEvent(
        request_id="r",
        choice=choice,
        tokens=[engine_pb2.Token(id=token) for token in tokens],
        cached_prompt_tokens=cached,
    )


def test_what_was_answered_is_submitted_again_and_what_ended_is_not() -> None:
    submission = _submission()
    first = submission.to_submit()
    assert all(not choice.generated_tokens for choice in first.choices)
    submission.take(_told(0, 7))
    submission.take(_told(2, 8, 9))
    submission.take(_told(0, 6))
    submission.end(0)
    submission.take(_told(0, 5))  # late: the front stopped it at a text
    rest = submission.to_submit()
    assert [(c.index, c.seed, list(c.generated_tokens)) for c in rest.choices] == [
        (1, 11, []),
        (2, 12, [8, 9]),
    ]
    for message in (first, rest):
        del message.choices[:]
    assert first == rest, "everything else is as it was"


def test_a_prompt_counts_as_cached_once_and_not_because_of_its_own_choices_or_a_restart() -> None:
    submission = _submission()
    assert submission.take(_told(1, 7, cached=128)) == 0, "found what the first choice had just computed"
    assert submission.take(_told(0, 7, cached=64)) == 64
    submission.outlive(ran=True)
    assert submission.take(_told(2, 7, cached=192)) == 0
    waited = _submission()
    waited.outlive(ran=False)
    assert waited.take(_told(0, 7, cached=64)) == 64


def test_it_lives_through_deaths_but_not_through_too_many_of_its_own() -> None:
    ran = _submission()
    for _ in range(MOST_RUNS_LOST - 1):
        ran.outlive(ran=True)
        ran.outlive(ran=False)
    with pytest.raises(RequestEndsEngines, match="2 times"):
        ran.outlive(ran=True)
    waited = _submission()
    for _ in range(MOST_DEATHS - 1):
        waited.outlive(ran=False)
    with pytest.raises(EngineLost, match="5 times"):
        waited.outlive(ran=False)


@dataclass(frozen=True)
class Case:
    """Requests as (name, choices, priority), the choices that were heard of, and those that ended."""

    rows: int
    requests: tuple[tuple[str, int, int], ...]
    may_run: set[str]
    heard: tuple[tuple[str, int], ...] = ()
    ended: tuple[tuple[str, int], ...] = ()
    removed: tuple[str, ...] = field(default=())


CASES = {
    "nobody": Case(4, (), set()),
    "all fit": Case(4, (("a", 1, 0), ("b", 1, 0)), {"a", "b"}),
    "the first have the rows": Case(2, (("a", 1, 0), ("b", 1, 0), ("c", 1, 0)), {"a", "b"}),
    "a part of the choices": Case(2, (("a", 1, 0), ("b", 3, 0), ("c", 1, 0)), {"a", "b"}),
    "priority first": Case(1, (("a", 1, 0), ("b", 1, -1), ("c", 1, 0)), {"b"}),
    "what told something has a row": Case(1, (("a", 1, 0), ("b", 1, 0)), {"b"}, heard=(("b", 0),)),
    "what ended has none": Case(
        1, (("a", 1, 0), ("b", 1, 0), ("c", 1, 0)), {"b"}, heard=(("a", 0),), ended=(("a", 0),)
    ),
    "more ran than there are rows": Case(
        1, (("a", 1, 0), ("b", 1, 0), ("c", 1, 0)), {"a", "b"}, heard=(("a", 0), ("b", 0))
    ),
    "what was removed counts no more": Case(1, (("a", 1, 0), ("b", 1, 0)), {"b"}, removed=("a",)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_who_may_have_had_a_row(case: Case) -> None:
    lives: InFlight[str] = InFlight()
    for name, choices, priority in case.requests:
        lives.add(name, range(choices), priority=priority, mailbox=name)
    for name, choice in case.heard:
        lives.heard(name, choice, ended=False)
    for name, choice in case.ended:
        lives.heard(name, choice, ended=True)
    for name in case.removed:
        lives.remove(name)
    assert lives.may_run(case.rows) == case.may_run


def test_a_mailbox_is_told_once_and_a_removed_one_never() -> None:
    lives: InFlight[list[int]] = InFlight()
    shared, own = [1], [1]  # equal, but not the same
    for name, mailbox in (("a", shared), ("b", shared), ("c", own), ("d", [2])):
        lives.add(name, [0], priority=0, mailbox=mailbox)
    lives.remove("d")
    lives.remove("unknown")
    lives.heard("unknown", 0, ended=True)
    assert [id(mailbox) for mailbox in lives.mailboxes()] == [id(shared), id(own)]
    assert lives.mailbox("b") is shared
    assert lives.mailbox("d") is None

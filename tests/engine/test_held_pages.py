"""References that are given, and given again: each goes once, and none that is not held."""

from __future__ import annotations

from services.decoder.engine.held_pages import HeldPages
from services.decoder.engine.host_pages import HostPage

P, Q = HostPage(3, 1), HostPage(4, 1)


def test_one_of_two_references_that_went_late_is_not_given_again() -> None:
    held = HeldPages()
    held.take([P, P, Q])
    assert held.still_here([P, Q]) == [P, Q]
    held.let_go([P], late=True)
    assert held.still_here([P, Q]) == [Q], "asked again, as often as it takes"
    assert held.still_here([P, Q, P]) == [P, Q], "the other one comes too"
    held.told([P, Q])
    assert held.still_here([P]) == [P]
    held.let_go([P], late=False)
    assert held.still_here([P]) == []


def test_what_a_lost_session_held_is_not_given_to_its_successor() -> None:
    assert HeldPages().still_here([P, P]) == []
    held = HeldPages()
    held.take([HostPage(P.page, P.generation + 1)])
    assert held.still_here([P]) == []

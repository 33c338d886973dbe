"""A cable pulled out before, in and between requests, and put back: right bytes, or an error in time."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.contract.transport.asker import Asker
from tests.contract.transport.peer import Peer
from tests.two_hosts import Host, two_hosts

FAULTS = ("deadline", "lost")


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "ucx-tcp"])
def test_out_and_in_again(hosts: tuple[Host, Host], transport: str) -> None:
    here, there = hosts
    with Peer(transport, host=here, stall=2.0) as peer, Asker(transport, peer.address, there) as asker:
        for moment in ("before", "during", "between"):
            assert asker.do("connect 20") == "", moment
            if moment == "between":
                assert asker.do("ask 20") == ""
            if moment == "during":
                asker.say("ask 2")
                time.sleep(0.003)  # an answer takes about as long
                there.link("down")
                assert asker.end() in ("", *FAULTS)  # the answer may be quicker than the hand at the cable
            else:
                there.link("down")
                assert asker.do("ask 2") in FAULTS, moment
            assert asker.do("close 1") == ""
            assert asker.do("connect 0.5") in FAULTS, moment
            there.link("up")
        assert asker.do("connect 20") == ""
        assert asker.do("ask 20") == ""
        assert asker.do("close 1") == ""
        peer.rest()


@pytest.mark.parametrize("transport", ["tcp", "ucx-tcp"])
def test_a_short_interruption_is_a_delay(hosts: tuple[Host, Host], transport: str) -> None:
    here, there = hosts
    with Peer(transport, host=here) as peer, Asker(transport, peer.address, there) as asker:
        assert asker.do("connect 20") == ""
        there.link("down")
        asker.say("ask 20")
        time.sleep(0.5)  # so long nothing arrives
        there.link("up")
        assert asker.end() == ""
        assert asker.do("close 1") == ""
        peer.rest()

"""The engine's loop with a real tiny model: who waits too long is told, and a breach of the books is seen."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest

from services.contract.errors import Unavailable
from services.decoder.engine.host_pages import HostPage, PagesLost
from services.decoder.engine.loop import Loop
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Finish, Sampling, Sequence
from services.decoder.engine.stepper import News
from services.decoder.settings import DecoderSettings
from tests.decoder import checkpoints


class Rig:
    """A loop stepped by hand, with a clock that stands still."""

    def __init__(self, path: Path, queue_seconds: float, store_seconds: float = 0.0) -> None:
        settings = DecoderSettings.model_validate(
            {
                "model": checkpoints.save(path, "llama"),
                "dtype": "float32",
                "max_rows": 1,
                "max_model_len": 128,
            }
        )
        self.engine = OfflineEngine(settings, 8 * 2**20)
        self.now = 0.0
        self.news: News = []
        self.loop = Loop(
            self.engine.scheduler,
            self.engine.runner,
            self.news.extend,
            queue_seconds=queue_seconds,
            store_seconds=store_seconds,
            clock=lambda: self.now,
        )

    def ask(self, name: str, priority: int = 0) -> Sequence:
        sequence = Sequence(name, 0, [5, 6, 7], Sampling(), seed=0, max_tokens=40, priority=priority)
        self.loop.submit([sequence])
        return sequence


def test_who_waits_too_long_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    rig = Rig(tmp_path, queue_seconds=30)
    runs, waits = rig.ask("runs"), rig.ask("waits")
    rig.loop.step()
    rig.now = 20
    late = rig.ask("late")
    rig.loop.step()
    assert waits.finish is None
    rig.now = 31
    rig.loop.step()
    assert waits.finish is Finish.NO_ROOM
    assert "no room came free in 30 s" in waits.error
    assert (waits, []) in rig.news
    assert runs.finish is late.finish is None
    while rig.engine.scheduler.has_work:
        rig.loop.step()
    assert runs.finish is late.finish is Finish.LENGTH


def test_choices_of_a_request_that_is_served_wait_for_one_another(tmp_path: Path) -> None:
    """They are let in when the first has computed their prompt, however long that takes."""
    rig = Rig(tmp_path, queue_seconds=30)
    first, second = (Sequence("both", i, [5, 6, 7], Sampling(), seed=i, max_tokens=40) for i in range(2))
    rig.loop.submit([first, second])
    rig.loop.step()
    rig.now = 31
    rig.loop.step()
    assert (first.row, second.finish) == (0, None)
    while not second.finish:
        rig.loop.step()
    assert second.finish is Finish.LENGTH


def test_without_a_limit_nobody_is_sent_away(tmp_path: Path) -> None:
    rig = Rig(tmp_path, queue_seconds=0)
    rig.ask("runs")
    waits = rig.ask("waits")
    rig.loop.step()
    rig.now = 1e9
    rig.loop.step()
    assert waits.finish is None


def test_a_breach_of_the_books_is_logged_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(tmp_path, queue_seconds=0)
    rig.loop.check_integrity()
    assert rig.loop.stats().integrity_violations == 0
    rig.engine.device_pages.take(1)
    with caplog.at_level(logging.ERROR):
        rig.loop.check_integrity()
    assert rig.loop.stats().integrity_violations == 1
    assert "integrity_violated what='device pages lost or owned twice'" in caplog.text


def test_the_books_are_checked_when_idle_and_at_the_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path, queue_seconds=0)
    thread = threading.Thread(target=rig.loop.run)
    thread.start()
    try:
        one = rig.ask("one")
        deadline = time.monotonic() + 90
        while not one.finish:
            assert time.monotonic() < deadline, "it does not end"
            time.sleep(0.01)  # a thread that only looks takes the interpreter from the one that works
        rig.engine.device_pages.take(1)
        while not rig.loop.stats().integrity_violations:
            assert time.monotonic() < deadline, "nobody looked"
            time.sleep(0.01)
    finally:
        rig.loop.stop()
        thread.join(90)
    assert rig.loop.stats().integrity_violations == 2


def test_one_that_was_parked_is_not_sent_away(tmp_path: Path) -> None:
    """It has waited for its first row, and waits for the next one as long as it must."""
    rig = Rig(tmp_path, queue_seconds=30)
    low = rig.ask("low", priority=1)
    rig.loop.step()
    high = rig.ask("high")
    rig.loop.step()
    assert low.is_parked
    rig.now = 31
    rig.loop.step()
    assert low.finish is None
    while rig.engine.scheduler.has_work:
        rig.loop.step()
    assert low.finish is high.finish is Finish.LENGTH
    assert (rig.loop.stats().parkings, rig.loop.stats().releases) == (1, 0)


def test_who_hears_of_an_end_finds_its_pages(tmp_path: Path) -> None:
    """Where others are to go on with them; otherwise they are sealed with the next step."""
    rig = Rig(tmp_path, queue_seconds=0)
    engine = rig.engine
    found: list[list[HostPage]] = []
    loop = Loop(
        engine.scheduler,
        engine.runner,
        lambda news: found.extend(engine.host.match(one.page_hashes) for one, _ in news if one.finish),
        seals_first=True,
    )
    loop.submit([Sequence("r", 0, [5 + i % 9 for i in range(70)], Sampling(), seed=0, max_tokens=1)])
    while not found:
        loop.step()
    assert len(found[0]) == 1


@pytest.mark.parametrize("store_seconds", [2.0, 0.0])
def test_a_store_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store_seconds: float) -> None:
    """Who holds its pages is told in time, or waits as long as it takes; who holds none always waits."""

    def away(*_: object) -> list[HostPage]:
        raise Unavailable("nobody is there")

    rig = Rig(tmp_path, queue_seconds=0, store_seconds=store_seconds)
    holds = Sequence("holds", 0, [5 + i % 9 for i in range(60)], Sampling(), seed=0, max_tokens=40)
    rig.loop.submit([holds])
    rig.loop.step()
    waits = rig.ask("waits")
    with monkeypatch.context() as patch:
        patch.setattr(rig.engine.host, "exchange", away)
        while rig.loop.step():
            assert holds.finish is None, "it never needed another page"
        rig.now = 1.9
        assert not rig.loop.step()
        assert holds.finish is None
        rig.now = 2.1
        assert not rig.loop.step()
        assert waits.finish is None
        assert holds.finish is (Finish.ERROR if store_seconds else None)
    while rig.engine.scheduler.has_work:
        rig.loop.step()
    assert waits.finish is Finish.LENGTH
    if store_seconds:
        assert holds.error == "the store did not answer within 2 s (nobody is there); send the request again"
    else:
        assert holds.finish is Finish.LENGTH
    rig.loop.check_integrity()
    assert (rig.loop.stats().integrity_violations, rig.engine.host.lent) == (0, 0)
    assert not rig.engine.scheduler.has_work


def test_requests_are_prepared_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds the interpreter's lock for a while, and the loop would wait for all of them in turn."""
    rig, beside = Rig(tmp_path, queue_seconds=0), [0, 0]  # now, and at most

    def slow(sequences: list[Sequence]) -> None:
        beside[0] += 1
        beside[1] = max(beside)
        time.sleep(0.02)  # the others come meanwhile, if they may
        beside[0] -= 1

    monkeypatch.setattr(rig.engine.scheduler, "prepare", slow)
    threads = [threading.Thread(target=rig.ask, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert beside == [0, 1]
    assert len(rig.engine.scheduler.waiting) == 4


def test_pages_that_are_lost_with_a_seal_leave_nothing_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed beside the steps would write pages that are somebody else's by now."""
    rig = Rig(tmp_path, queue_seconds=0)
    engine, waits = rig.engine, list[bool]()
    loop = Loop(engine.scheduler, engine.runner, rig.news.extend, seals_first=True)
    one = Sequence("r", 0, [5 + i % 9 for i in range(70)], Sampling(), seed=0, max_tokens=1)

    def lost() -> None:
        raise PagesLost("the store came back empty")

    monkeypatch.setattr(engine.scheduler, "seal_now", lost)
    monkeypatch.setattr(type(engine.runner), "wait", lambda self: waits.append(one.finish is Finish.LENGTH))
    loop.submit([one])
    while not one.finish:
        loop.step()
    assert waits == [True]

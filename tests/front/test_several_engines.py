"""Several engines behind one front: who gets what, and what one engine's death is to the others."""

from __future__ import annotations

import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from services.contract.errors import SetupError
from services.decoder.engine.settings import EngineSettings
from services.decoder.front.engines import SLACK_CHOICES
from services.decoder.settings import DecoderSettings
from tests.front.live import LiveFront, live_front, orders, until

TWO = "--device=cpu,cpu"


def _pids(front: LiveFront) -> dict[int, int]:
    return {start["engine"]: start["pid"] for start in front.noted("start")}


def _until_both_serve(front: LiveFront) -> None:
    def both() -> bool:
        return httpx.get(f"{front.url}/health").text.count(": the engine serves") == 2

    until(both, "both engines")


def _text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    found: str = response.json()["choices"][0]["text"]
    return found


def test_like_prompts_go_together_and_none_is_left_idle(default_model: Path) -> None:
    with live_front(default_model, TWO, "--max-rows=32") as front, ThreadPoolExecutor(12) as pool:
        _until_both_serve(front)
        asked = []
        for number in range(12):
            asked.append(pool.submit(front.complete, prompt="a b c", cache_salt=orders(hold=True)))
            until(lambda number=number: len(front.noted("taken_by")) > number, "it to be taken")  # type: ignore[misc]  # mypy cannot type a default of a lambda
        taken = front.noted("taken_by")
        assert len(set(taken[: SLACK_CHOICES + 1])) == 1, "an idle engine is no reason to compute it twice"
        counts = Counter(taken)
        assert abs(counts[0] - counts[1]) <= SLACK_CHOICES + 1
        running = [f'hotset_requests_running{{engine="{index}"}} {counts[index]}.0' for index in (0, 1)]
        metrics = httpx.get(f"{front.url}/metrics").text
        assert all(line in metrics for line in running), metrics
        assert metrics.count("# TYPE hotset_steps_total counter") == 1
        assert front.stop() == 0


def test_different_prompts_spread(default_model: Path) -> None:
    with live_front(default_model, TWO) as front:
        _until_both_serve(front)
        for number in range(24):
            assert front.complete(prompt=f"{number} bottles", max_tokens=1).status_code == 200
        assert min(Counter(front.noted("taken_by"))[index] for index in (0, 1)) >= 3
        one = Counter(front.noted("taken_by"))
        for _ in range(3):  # where it went before, it goes again
            front.complete(prompt="7 bottles", max_tokens=1)
        assert 3 in (Counter(front.noted("taken_by")) - one).values()


def test_a_death_harms_the_streams_of_one_engine_and_the_other_takes_them(default_model: Path) -> None:
    """The dead one never comes back, so that what it had can only go on elsewhere."""
    prompts = [f"{number} bottles" for number in range(8)]
    with live_front(default_model, TWO, start={"later_delay": 3600}) as front, ThreadPoolExecutor(8) as pool:
        _until_both_serve(front)

        def ask(number: int, pause: float) -> str:
            salt = orders(say=f"one two three four {number}", pause=pause)
            return _text(front.complete(prompt=prompts[number], cache_salt=salt, max_tokens=50))

        undisturbed = [ask(number, 0) for number in range(8)]
        before = len(front.noted("taken_by"))
        asked = [pool.submit(ask, number, 1.0) for number in range(8)]
        until(lambda: len(front.noted("taken_by")) == before + 8, "all to be taken")
        taken = Counter(front.noted("taken_by")[before:])
        assert set(taken) == {0, 1}
        os.kill(_pids(front)[0], signal.SIGKILL)
        assert [one.result() for one in asked] == undisturbed
        again = front.noted("taken_by")[before + 8 :]
        assert again == [1] * taken[0], "only what the dead engine had is handed over, and to the other"
        metrics = httpx.get(f"{front.url}/metrics").text
        assert f'hotset_requests_resubmitted_total{{engine="1"}} {taken[0]}.0' in metrics
        assert 'hotset_engine_ready{engine="0"} 0.0' in metrics
        assert 'hotset_engine_ready{engine="1"} 1.0' in metrics
        assert httpx.get(f"{front.url}/ready").status_code == 200
        os.kill(_pids(front)[1], signal.SIGKILL)
        until(lambda: httpx.get(f"{front.url}/ready").status_code == 503, "nobody to serve")
        assert front.stop() == 0


def test_a_first_start_that_fails_says_which_engine(default_model: Path) -> None:
    with live_front(default_model, TWO, start={"fail": "no such card"}, wait=False) as front:
        assert front.until_exit(60) == 2
        error = front.log[front.log.rindex("error: engine ") :]
        assert "no such card" in error
        assert "Traceback" not in front.log


def _settings(*flags: str) -> DecoderSettings:
    return DecoderSettings.from_command_line(["--model=/nowhere", *flags], program="test")


def test_devices() -> None:
    assert _settings().devices == ("auto",)
    assert _settings("--device=cuda:1, cuda:0").devices == ("cuda:1", "cuda:0")
    assert _settings("--device=cpu,cpu", "--device=cpu").devices == ("cpu",), "the last of equal flags counts"


@pytest.mark.parametrize("device", ["cuda:0,cuda:0", "cpu,cuda:0", "auto,auto", "cpu,", "cuda:0,auto"])
def test_devices_that_do_not_go_together(device: str) -> None:
    with pytest.raises(SetupError, match="device: "):
        _settings(f"--device={device}")


def test_an_engine_has_one_device() -> None:
    flags = ["--model=/nowhere", "--engine-socket=/nowhere", "--device=cpu,cpu"]
    with pytest.raises(SetupError, match="an engine has one device"):
        EngineSettings.from_command_line(flags, program="test")

"""Two real engines on CPUs behind one front, over one store: one is killed under eight streams."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.engine.processes import eventually
from tests.front.real import Service, real_service, tiny_model
from tests.front.test_restart_real import ARENA_BYTES, STREAMS, compare

RUNNING = 'hotset_requests_running{engine="%d"}'
CACHED = 'hotset_cached_prompt_tokens_total{engine="%d"}'
LONG = "a long prompt"  # of the streams


def _engines(service: Service) -> dict[int, psutil.Process]:
    """By their numbers."""
    found = {}
    for process in psutil.Process(service.front.popen.pid).children():
        [flag] = [word for word in process.cmdline() if word.startswith("--engine-index=")]
        found[int(flag.split("=")[1])] = process
    return found


@pytest.mark.slow
def test_one_of_two_is_killed_under_eight_streams(default_model: Path, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny", default_model)
    with real_service(model, ARENA_BYTES, device="cpu,cpu") as service:
        eventually("both serve", lambda: service.metric("hotset_engine_ready") == 2)
        streams = {name: stream for name, stream in STREAMS.items() if name != "a stop text"}
        undisturbed = service.ask_all(streams)
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(service.ask_all, streams)
            eventually("both work", lambda: all(service.metric(RUNNING % index) for index in (0, 1)))
            _engines(service)[0].kill()
            answers = asked.result()
            assert httpx.get(f"{service.url}/ready").status_code == 200, "the other one serves all the time"
        compare(answers, undisturbed)
        assert service.metric("hotset_requests_resubmitted_total") > 0
        assert service.metric('hotset_engine_restarts_total{engine="1"}') == 0
        eventually("both serve again", lambda: service.metric("hotset_engine_ready") == 2)
        eventually("no page is held", lambda: service.held_pages() == 0)

        # What one engine computes, the other finds: the prompt prefers one of them, which is killed.
        path, body = streams[LONG]
        before = [service.metric(CACHED % index) for index in (0, 1)]
        service.ask(path, body)
        hits = [service.metric(CACHED % index) - before[index] for index in (0, 1)]
        home = hits.index(max(hits))
        assert hits[home] > 0
        other = 1 - home
        before_other = service.metric(CACHED % other)
        _engines(service)[home].kill()
        eventually("it is gone", lambda: service.metric("hotset_engine_ready") == 1)
        service.ask(path, body)
        assert service.metric(CACHED % other) - before_other == hits[home]
        assert service.metric("hotset_integrity_violations_total") == 0

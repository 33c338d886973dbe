"""Too little room for everybody, with real processes: who is served, who is refused, and what a client that
leaves takes along, wherever its request was.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.processes import eventually
from tests.front.live import error_of
from tests.front.real import Service, real_service, tiny_model

ARENA_BYTES = 4 * 2**20  # 20 pages: 1,280 tokens
LONGEST, ROWS, WAITING = 1024, 3, 6
URL = "/v1/completions"
ABORTED = 'hotset_requests_total{endpoint="completions",outcome="abort"}'


@pytest.fixture(scope="module")
def service(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    model = tiny_model(tmp_path_factory.mktemp("tiny"), default_model)
    sizes = {"max_rows": ROWS, "max_waiting": WAITING, "max_model_len": LONGEST}
    with real_service(model, ARENA_BYTES, **sizes) as made:
        yield made


def body(**fields: Any) -> dict[str, Any]:
    base = {"model": "fake", "prompt": "a b c", "max_tokens": 8, "seed": 1, "top_k": 4, "ignore_eos": True}
    return base | fields


def post(service: Service, **fields: Any) -> httpx.Response:
    return httpx.post(f"{service.url}{URL}", json=body(**fields), timeout=120)


def check_idle(service: Service) -> None:
    """Rows, slots, pages on both sides: all back, and every check of the books was passed."""
    names = ("requests_waiting", "requests_running", "host_pages_held", 'rows{engine="0",state="used"}')
    for name in (*names, 'hot_slots{engine="0",state="used"}', 'device_pages{engine="0",state="used"}'):
        eventually(f"no {name}", lambda name=name: service.metric(f"hotset_{name}") == 0, 20)  # type: ignore[misc]  # mypy cannot type a default of a lambda
    eventually("no page is held", lambda: service.held_pages() == 0)
    assert service.metric("hotset_integrity_violations_total") == 0


def test_a_crowd_too_large_for_the_arena(service: Service) -> None:
    """Host pages run out while all rows decode: who was taken is answered rightly, the others are told."""
    engine = service.engine.pid
    asked = [{"prompt": [5 + i % 50 for i in range(40 + n)], "max_tokens": 420, "seed": n} for n in range(14)]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda fields: post(service, **fields), asked))
    refused = [answer for answer in answers if answer.status_code == 429]
    for answer in refused:
        assert int(answer.headers["retry-after"]) > 0
        assert error_of(answer)["code"] == "rate_limit_exceeded"
        assert "try again later" in error_of(answer)["message"]
    assert len(asked) - len(refused) >= ROWS + WAITING
    assert refused, "there was room for all"
    assert service.metric("hotset_requests_rewound_total") > 0, "host pages never ran out"
    assert service.engine.pid == engine
    for fields, answer in zip(asked[:2], answers[:2], strict=True):
        if answer.status_code == 200:
            again = post(service, **fields)
            assert again.json()["choices"] == answer.json()["choices"]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert post(service).status_code == 200, "a small one, afterwards"
    check_idle(service)


@pytest.mark.parametrize("prompt", [700, LONGEST - 1])
def test_to_the_last_token_and_one_more(service: Service, prompt: int) -> None:
    """One that can never fit is refused at once, and holds up nobody."""
    for total in (LONGEST - 1, LONGEST, LONGEST + 1, 100 * LONGEST):
        fields = {"prompt": [5] * prompt, "max_tokens": total - prompt}
        if total > LONGEST:
            refusal = error_of(post(service, **fields))
            assert refusal["code"] == "context_length_exceeded"
            assert str(LONGEST) in refusal["message"]
            assert str(total) in refusal["message"] or str(total - prompt) in refusal["message"]
        elif total - prompt:
            answer = post(service, **fields)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["total_tokens"] == total
        assert post(service).status_code == 200, "the next one"
    check_idle(service)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stage", ["queued", "prefill", "decode", "parked", "finished"])
def test_a_client_that_leaves_takes_everything_along(service: Service, stage: str, n: int) -> None:
    # 700 tokens or so that nobody had before.
    prompt = " ".join(f"{stage} {n} {i}" for i in range(100)) if stage == "prefill" else f"{stage} {n}"
    slow = {"stream": True, "top_k": 0}  # to draw from all tokens takes the CPU a few milliseconds
    leaver = body(prompt=prompt, n=n, max_tokens=4 if stage == "finished" else 250, **slow)
    leaver["priority"] = 0 if stage == "queued" else 1
    long = body(max_tokens=900, **slow)
    aborted = service.metric(ABORTED)
    with ExitStack() as others, ExitStack() as its_own:

        def begin(stack: ExitStack, fields: dict[str, Any]) -> httpx.Response:
            stream = httpx.stream("POST", f"{service.url}{URL}", json=fields, timeout=120)
            response = stack.enter_context(stream)
            assert response.status_code == 200, response.read()
            return response

        def running() -> float:
            return service.metric("hotset_requests_running")

        def waiting() -> float:
            return service.metric("hotset_requests_waiting")

        if stage == "queued":
            for seed in range(ROWS):
                begin(others, long | {"seed": seed})
            eventually("every row is taken", lambda: running() == ROWS)
        answer = begin(its_own, leaver)
        if stage == "queued":
            eventually("it waits", lambda: waiting() == n)
        if stage == "prefill":
            eventually("it runs", running)
        if stage in ("decode", "parked"):
            coming = answer.iter_bytes()  # kept, for the end of it would be the connection's
            next(coming)
        if stage == "parked":
            for seed in range(ROWS):
                begin(others, long | {"seed": seed})
            eventually("it is parked", lambda: service.metric("hotset_requests_parked"))
        if stage == "finished":
            answer.read()
        its_own.close()
        ended = 0 if stage == "finished" else n
        eventually("all of it is aborted", lambda: service.metric(ABORTED) == aborted + ended)
        eventually("none of it waits", lambda: waiting() == 0)
    check_idle(service)


def test_best_of_is_refused_by_name(service: Service) -> None:
    refusal = error_of(post(service, best_of=3, n=2))
    assert (refusal["code"], refusal["param"]) == ("unsupported_parameter", "best_of")

"""An engine process with a tiny checkpoint beside a real kvstore: its start, end, and what it survives."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import torch
from hotset.v1 import engine_pb2 as pb

from services.decoder.engine.memory_plan import kv_fingerprint, kv_planes, kv_shape
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.engine.store_session import StoreSession
from services.decoder.front.engine_process import TERM_SECONDS
from services.decoder.models.spec import ModelSpec
from services.decoder.settings import DecoderSettings
from tests.decoder import checkpoints
from tests.engine.processes import Engine, Keeper, KvStore, eventually

Alone = Callable[[list[int], int], list[int]]

PAGE_BYTES = 3 * (2 * 4 * 16 * 2 * 16 * 4 + 4 * 2 * 2 * 16 * 4)
"""Of the tiny checkpoint: layers x (groups x blocks x tokens x key and value x head_dim x float + bounds)."""
FLAGS: dict[str, object] = {
    "dtype": "float32",
    "budget_tokens": 32,
    "max_step_tokens": 64,
    "max_rows": 4,
    "threads": 1,
}


def arena_bytes(pages: int) -> int:
    """An arena that holds exactly so many pages."""
    return max(4 * 2**20, 2 * 2**20 + pages * PAGE_BYTES)


PAGES = 2 * 2**20 // PAGE_BYTES
"""Of the smallest arena that kvstore makes."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(
        tmp_path_factory.mktemp("tiny"), "llama", head_dim=16, max_position_embeddings=4096
    )


@pytest.fixture(scope="module")
def alone(tiny: Path) -> Alone:
    """The right answer to a prompt: of an engine without services and without neighbours."""
    settings = DecoderSettings.model_validate({"model": tiny, **FLAGS})
    engine = OfflineEngine(settings, arena_bytes(PAGES))

    def answer(prompt: list[int], tokens: int) -> list[int]:
        sequence = Sequence("r", 0, prompt, Sampling(), seed=1, max_tokens=tokens)
        engine.generate([sequence])
        return sequence.generated

    return answer


def prompt(length: int, seed: int = 0) -> list[int]:
    return [3 + (7 * i * i + 31 * seed * i + seed) % 200 for i in range(length)]


class Pair:
    """A kvstore and an engine on it."""

    def __init__(self, shm: Path, keep: Keeper, tiny: Path, **flags: object) -> None:
        self.shm, self.keep, self.model, self.flags = shm, keep, tiny, {**FLAGS, **flags}
        self.store = keep(KvStore(shm / "arena", arena_bytes(PAGES)))
        self.engine = self.start_engine()

    def start_engine(self) -> Engine:
        return self.keep(Engine(self.shm / "e.sock", self.model, self.store.address, **self.flags))


@pytest.fixture
def pair(shm: Path, keep: Keeper, tiny: Path) -> Pair:
    """For a test that ends the engine."""
    made = Pair(shm, keep, tiny)
    made.engine.wait_ready()
    return made


@pytest.fixture(scope="module")
def lasting(module_shm: Path, module_keep: Keeper, tiny: Path) -> Pair:
    """For tests that leave it idle; its store may have been replaced."""
    made = Pair(module_shm, module_keep, tiny)
    made.engine.wait_ready()
    return made


def check_idle(pair: Pair) -> None:
    """Every row, slot and page is back where it came from."""
    eventually("the engine is idle", pair.engine.idle)

    def all_back() -> bool:  # a restarted store holds sealed pages until nobody is waited for
        now = pair.store.stats()
        return now.free_pages + now.cached_pages == now.total_pages and not now.open_pages + now.sealed_pages

    eventually("every page is free or cached", all_back)


def test_an_answer_and_its_end(lasting: Pair, alone: Alone) -> None:
    engine = lasting.engine
    engine.submit("first", prompt(70), 40)
    assert engine.answer("first") == alone(prompt(70), 40)
    last = engine.finished("first")
    assert last is not None
    assert last.finish_reason == pb.FINISH_REASON_LENGTH
    check_idle(lasting)


def test_two_decoders_on_one_store_need_no_names(lasting: Pair) -> None:
    """As two servers on two ports have them; each finds what the other one computed."""
    flags = {**FLAGS, "port": 8001}
    other = lasting.keep(Engine(lasting.shm / "other.sock", lasting.model, lasting.store.address, **flags))
    other.wait_ready()
    assert lasting.store.stats().sessions == 2
    for engine in (lasting.engine, other):
        engine.submit("common", prompt(150, 5), 6)
    assert lasting.engine.answer("common") == other.answer("common")
    other.end()
    eventually("its session ends", lambda: lasting.store.stats().sessions == 1)
    check_idle(lasting)


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "too long": ({"max_tokens": 10**6}, "this server holds"),
    "no prompt": ({"prompt_tokens": []}, "no tokens"),
    "no choice": ({"choices": []}, "choices with indices of their own"),
    "a choice twice": ({"choices": [pb.Choice(index=1), pb.Choice(index=1)]}, "indices of their own"),
    "prompt": ({"prompt_tokens": [3, 211]}, "prompt_tokens has token id 211, outside the vocabulary of 211"),
    "stop": ({"stop_token_ids": [2**32 - 1], "min_tokens": 3}, "stop_token_ids has token id 4294967295"),
    "known": ({"choices": [pb.Choice(generated_tokens=[500])]}, "generated_tokens has token id 500"),
    "bias": ({"sampling": pb.SamplingParams(logit_bias={211: 1.0})}, "logit_bias has token id 211"),
    "biased by nothing": (
        {"sampling": pb.SamplingParams(logit_bias={4: float("nan")})},
        "logit_bias of 4 is nan",
    ),
    "temperature": ({"sampling": pb.SamplingParams(temperature=float("nan"))}, "temperature is nan"),
    "cold": ({"sampling": pb.SamplingParams(temperature=-1)}, "temperature is -1.0"),
    "top_p": (
        {"sampling": pb.SamplingParams(top_p=1.5)},
        "top_p is 1.5; it must be a number from 0.0 to 1.0",
    ),
    "penalty": ({"sampling": pb.SamplingParams(presence_penalty=float("inf"))}, "presence_penalty is inf"),
    "top_logprobs": ({"sampling": pb.SamplingParams(logprobs=True, top_logprobs=21)}, "at most 20 are told"),
}


def test_a_request_that_makes_no_sense_is_refused_and_the_next_is_served(lasting: Pair, alone: Alone) -> None:
    for name, (changes, message) in REFUSED.items():
        fields = {"prompt": prompt(5), "max_tokens": 4} | changes
        with pytest.raises(grpc.RpcError) as refusal:
            lasting.engine.submit(name, **fields)  # type: ignore[arg-type]  # fields by name
        assert isinstance(refusal.value, grpc.Call)
        assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT, name
        assert message in (refusal.value.details() or ""), name
    lasting.engine.submit("good", prompt(5), 4)
    assert lasting.engine.answer("good") == alone(prompt(5), 4)


def test_short_of_pages_answers_are_those_of_an_uncontended_run(
    lasting: Pair, alone: Alone, tiny: Path
) -> None:
    """Another engine holds most of the arena. Three answers that do not fit together: parked, resumed and
    replayed, each token told once.
    """
    spec = ModelSpec.read(tiny)
    settings = DecoderSettings.model_validate({"model": tiny, **FLAGS})
    shape = kv_shape(settings, spec, torch.float32)
    other = StoreSession(lasting.store.address, "engine-1")
    try:
        other.attach(kv_fingerprint(spec, shape), shape.page_tokens, kv_planes(settings, shape), 20)
        assert other.exchange([], other.total - 5) is not None
        for number in range(3):
            lasting.engine.submit(f"short {number}", prompt(50 + number, number), 120)
        replayed, seen = False, 0
        while not all(lasting.engine.finished(f"short {number}") for number in range(3)):
            now = lasting.engine.stats()
            assert lasting.store.stats().open_pages <= other.total
            replayed |= seen > 0 and now.requests_waiting > 0
            seen = len(lasting.engine.tokens("short 2"))
            time.sleep(0.02)
        for number in range(3):
            assert lasting.engine.answer(f"short {number}") == alone(prompt(50 + number, number), 120)
        assert replayed, "there was room for all, and nothing was shown"
    finally:
        other.close()
    check_idle(lasting)


def test_a_store_killed_in_mid_answer_comes_back_and_the_answer_is_right(lasting: Pair, alone: Alone) -> None:
    engine, tokens = lasting.engine, 150
    engine.submit("a", prompt(50), tokens)
    engine.submit("b", prompt(90, 2), tokens)
    eventually("both answer", lambda: min(len(engine.tokens("a")), len(engine.tokens("b"))) > 5)
    lasting.store.end(signal.SIGKILL)
    lasting.store = lasting.keep(lasting.store.again())
    assert engine.answer("a") == alone(prompt(50), tokens)
    assert engine.answer("b") == alone(prompt(90, 2), tokens)
    check_idle(lasting)
    assert lasting.store.stats().sessions == 1


def test_a_killed_engine_leaves_nothing_and_a_new_one_goes_on_until_sigterm(pair: Pair, alone: Alone) -> None:
    """Its pages come back by the lock alone; the next takes prompt and tokens so far, and tells the rest.

    On SIGTERM in mid-answer it gives everything back at once.
    """
    store, tokens = pair.store, 150
    right = alone(prompt(60), tokens)
    pair.engine.submit("r", prompt(60), tokens)
    eventually("it answers", lambda: len(pair.engine.tokens("r")) > 20)
    assert store.stats().open_pages > 0
    pair.engine.end(signal.SIGKILL)
    eventually("the store notices", lambda: store.stats().open_pages == 0)
    assert store.stats().sessions == 0
    so_far = pair.engine.tokens("r")
    assert so_far == right[: len(so_far)]

    engine = pair.start_engine()
    engine.wait_ready()
    engine.submit("r", prompt(60), tokens, choices=[pb.Choice(index=0, seed=1, generated_tokens=so_far)])
    assert so_far + engine.answer("r") == right

    engine.submit("long", prompt(60, 1), 900)
    eventually("it answers", lambda: len(engine.tokens("long")) > 5)
    assert store.stats().open_pages > 0
    assert engine.end_waits() < TERM_SECONDS, "the front kills it then"
    assert (store.stats().open_pages, store.stats().sessions) == (0, 0)
    assert "Traceback" not in engine.text


@pytest.mark.parametrize("store_answers", [True, False])
def test_sigterm_during_the_start_ends_it(shm: Path, keep: Keeper, tiny: Path, store_answers: bool) -> None:
    """While it waits for a store that is not there, and while it imports and loads."""
    address = "127.0.0.1:9"
    if store_answers:
        store = keep(KvStore(shm / "arena", arena_bytes(PAGES)))
        address = store.address
    engine = keep(Engine(shm / "e.sock", tiny, address, **FLAGS))
    eventually("it listens", engine.describe)

    def busy() -> bool:
        found = engine.describe()
        assert found is not None
        assert found.state == pb.ENGINE_STATE_STARTING
        assert found.detail
        return store_answers or "attaching to kvstore at 127.0.0.1:9" in found.detail

    eventually("it is busy starting", busy)
    with pytest.raises(grpc.RpcError) as refusal:
        engine.submit("early", [3], 1)
    assert isinstance(refusal.value, grpc.Call)
    assert refusal.value.code() == grpc.StatusCode.UNAVAILABLE
    assert engine.end_waits() < TERM_SECONDS, "the front kills it then"
    assert "Traceback" not in engine.text
    if store_answers:
        eventually("no session is left", lambda: store.stats().sessions == 0)


FAILED: dict[str, tuple[dict[str, object], str]] = {
    "no model": ({"model": "/nowhere"}, "error: /nowhere is no Hugging Face checkpoint"),
    "no store": ({"kvstore": "127.0.0.1:9", "store_wait_seconds": 0.1}, "error: no kvstore at 127.0.0.1:9"),
    "too long": ({"max_model_len": 4097}, "error: --max-model-len 4097 exceeds the model's 4096 positions"),
}


@pytest.mark.parametrize("name", FAILED)
def test_a_start_that_fails_says_why_once_and_exits_2(shm: Path, keep: Keeper, tiny: Path, name: str) -> None:
    store = keep(KvStore(shm / "arena", arena_bytes(PAGES)))
    changes, message = FAILED[name]
    settings = {"model": tiny, "kvstore": store.address} | FLAGS | changes
    engine = keep(
        Engine(shm / "e.sock", Path(str(settings.pop("model"))), str(settings.pop("kvstore")), **settings)
    )
    told: list[str] = []

    def failed() -> bool:
        found = engine.describe()
        if found is not None and found.state == pb.ENGINE_STATE_FAILED:
            told.append(found.detail)
        return bool(told) or engine.popen.poll() is not None

    eventually("it fails", failed)
    assert engine.wait() == 2
    lines = [line for line in engine.text.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert lines[0].startswith(message)
    assert told == [lines[0].removeprefix("error: ")], "Describe tells the same, while it lasts"
    assert "Traceback" not in engine.text


def test_flags_that_make_no_sense_exit_2_before_anything_starts(keep: Keeper, tmp_path: Path) -> None:
    engine = keep(Engine(tmp_path / "e.sock", tmp_path, "127.0.0.1:9", budget_tokens=17))
    assert engine.wait() == 2
    assert "multiples of block_tokens" in engine.text
    assert "Traceback" not in engine.text


@pytest.mark.slow
def test_sigterm_beside_a_store_that_hangs(pair: Pair) -> None:
    pair.engine.submit("r", prompt(60), 900)
    eventually("it answers", lambda: len(pair.engine.tokens("r")) > 5)
    pair.store.send(signal.SIGSTOP)
    assert pair.engine.end_waits() < 10
    pair.store.send(signal.SIGCONT)
    eventually("the store notices", lambda: pair.store.stats().open_pages == 0)


def test_a_store_that_comes_back_empty_ends_the_engine(pair: Pair) -> None:
    """Its pages are gone, so it must not go on; whoever started it starts it again."""
    pair.engine.submit("r", prompt(60), 900)
    eventually("it answers", lambda: len(pair.engine.tokens("r")) > 5)
    pair.store.end()
    pair.keep(pair.store.again())
    assert pair.engine.wait() == 2
    assert "error: kvstore came back" in pair.engine.text

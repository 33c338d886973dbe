"""KV events of a real engine: a router is told of what a prompt would find, and of nothing else."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.decoder import checkpoints
from tests.engine.processes import FLAGS, Engine, Keeper, KvStore, eventually
from tests.kvstore.kv_subscriber import AllBlocksCleared, BlockStored, Subscriber

ARENA_BYTES = 16 * 2**20
PROMPT = [3 + (7 * at * at) % 200 for at in range(300)]


@pytest.mark.slow
def test_only_what_a_prompt_covers_is_told(shm: Path, keep: Keeper, tmp_path: Path) -> None:
    tiny = checkpoints.save(tmp_path / "tiny", "llama", max_position_embeddings=1024)
    flags = ("--kv-events=tcp://127.0.0.1:0", "--kv-events-replay=tcp://127.0.0.1:0")
    store = keep(KvStore(shm / "arena", ARENA_BYTES, flags=flags))
    engine = keep(Engine(shm / "engine.sock", tiny, store.address, **FLAGS))
    engine.wait_ready()
    engine.submit("one", PROMPT, 100)
    assert len(engine.answer("one")) == 100
    eventually("all is back", engine.idle)
    pages = len(PROMPT) // 64  # of the prompt; the next ones hold some of the answer
    eventually("those of the answer are kept too", lambda: store.stats().cached_pages == 399 // 64)
    live, replay = re.findall(r"^kv events (\S+)$", store.text, re.MULTILINE)
    with Subscriber(live, replay) as router:
        router.until(lambda: len(router.events) >= 1 + pages, "the pages")
        stored = [event for event in router.events if isinstance(event, BlockStored)]
        assert [event for event in router.events if event not in stored] == [AllBlocksCleared()]
        assert [event.token_ids for event in stored] == [PROMPT[at : at + 64] for at in range(0, 256, 64)]
        assert list(router.present().values()) == [event.token_ids for event in stored], "a chain"
        engine.submit("again", PROMPT, 1)
        engine.answer("again")
        eventually("all is back", engine.idle)
        assert engine.events["again", 0][0].cached_prompt_tokens == 256
        router.ask(0)
        assert len(router.events) == 1 + pages, "what is found again is no news"
        told = list(router.events)
    store.end(signal.SIGKILL)
    store = keep(KvStore(shm / "arena", ARENA_BYTES, listen=store.address, flags=flags))
    live, replay = re.findall(r"^kv events (\S+)$", store.text, re.MULTILINE)
    eventually("the engine is back", lambda: store.stats().sessions == 1)
    with Subscriber(live, replay) as router:
        for name, prompt in (("other", PROMPT[:64] + PROMPT[:80]), ("once more", PROMPT)):
            engine.submit(name, prompt, 1)
            engine.answer(name)
            eventually("all is back", engine.idle)
        cached = {name: engine.events[name, 0][0].cached_prompt_tokens for name in ("other", "once more")}
        assert cached == {"other": 64, "once more": 256}
        router.until(lambda: len(router.events) >= 2 + pages, "what the earlier life left, and one page more")
        assert [event for event in router.events if event in told] == told

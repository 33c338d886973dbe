"""An engine process whose model chooses by an indexer of its own, and its next life on the same store."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.decoder import checkpoints
from tests.decoder.dsa_rig import ask, engine_of, prompt_of
from tests.engine.processes import Engine, Keeper, KvStore


def test_index_keys_outlive_an_engine(shm: Path, keep: Keeper, tmp_path: Path) -> None:
    """Without a flag about the choice. The second engine finds two pages of the prompt and goes on.

    It attends to hits first, and says so.
    """
    path = checkpoints.save(tmp_path, "glm_moe_dsa", index_topk_freq=2, index_skip_topk_offset=1)
    alone = ask("alone", prompt_of(150), 60)
    engine_of(path).generate([alone])

    store = keep(KvStore(shm / "arena", 8 * 2**20))
    flags: dict[str, object] = {"dtype": "float32", "device": "cpu", "threads": 1, "max_rows": 2}
    first = keep(Engine(shm / "first.sock", path, store.address, **flags))
    first.wait_ready()
    first.submit("r", alone.prompt, 60)
    assert first.answer("r") == alone.generated
    first.end(signal.SIGKILL)

    second = keep(Engine(shm / "second.sock", path, store.address, **flags, hits_first=True))
    second.wait_ready()
    second.submit("r", alone.prompt, 60)
    assert second.answer("r") == alone.generated
    assert second.stats().cached_prompt_tokens == 128
    for engine, says in ((first, False), (second, True)):
        engine.end()
        assert ("depend on residency" in engine.text) == says

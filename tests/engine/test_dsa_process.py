"""Engine processes whose model chooses by an indexer of its own, one after the other on the same store."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

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


@pytest.mark.usefixtures("one_thread")
def test_records_in_eight_bits_are_said_and_never_met_by_others(
    shm: Path, keep: Keeper, tmp_path: Path
) -> None:
    """The store has pages of one kind; an engine of the other kind is refused, and ends with the reason."""
    path = checkpoints.save(tmp_path, "glm_moe_dsa", kv_lora_rank=128)
    alone = ask("alone", prompt_of(150), 20)
    # In the processes' shapes: other last bits would be other codes here and there.
    shapes: dict[str, object] = {"max_step_tokens": 512, "window_tokens": 16384}
    engine_of(path, record_dtype="float8", **shapes).generate([alone])

    store = keep(KvStore(shm / "arena", 8 * 2**20))
    flags: dict[str, object] = {"dtype": "float32", "device": "cpu", "threads": 1, "max_rows": 2}
    first = keep(Engine(shm / "first.sock", path, store.address, **flags, record_dtype="float8"))
    first.wait_ready()
    assert "records_not_exact record_dtype=float8 record_bytes=176" in first.text
    assert "records of 176 bytes in float8: NOT EXACT" in first.text
    first.submit("r", alone.prompt, 20)
    assert first.answer("r") == alone.generated

    second = keep(Engine(shm / "second.sock", path, store.address, **flags, engine_index=1))
    assert second.wait() == 2
    assert "refused: the arena is laid out for other planes, page size or model" in second.text
    first.submit("again", alone.prompt, 20)
    assert len(first.answer("again")) == 20
    assert first.stats().cached_prompt_tokens == 128

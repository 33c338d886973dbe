"""A store on one host and its engine on another: namespaces with a cable between, which can be pulled out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.decoder.engine.offline import OfflineEngine
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.spec import ModelSpec
from tests.decoder import checkpoints
from tests.decoder.test_exact import requests, settings
from tests.engine.processes import Engine, Keeper, KvStore, eventually
from tests.engine.remote_rig import Rig, answers
from tests.two_hosts import Host, two_hosts

pytestmark = pytest.mark.slow
LENGTHS = (700, 900, 333)
TOKENS = 200


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as made:
        yield made


def flags(transport: str, host: Host) -> tuple[str, ...]:
    if transport == "tcp":
        return ("--data-transport=tcp", f"--data-listen={host.address}:0")
    return ("--data-transport=ucx", "--ucx-tls=tcp,self", f"--ucx-devices={host.device}", "--ucx-lanes=tcp")


def engine_in(host: Host) -> type[Engine]:
    class EngineThere(Engine):
        before = host.before

    return EngineThere


def ucx_of(transport: str, host: Host) -> dict[str, object]:
    if transport == "tcp":
        return {}
    return {"ucx_tls": "tcp,self", "ucx_devices": host.device, "ucx_lanes": "tcp"}


@pytest.fixture(scope="module")
def spoken(default_model: Path) -> list[list[int]]:
    """What an engine that maps its arena says to all prompts together, 200 tokens each, greedily."""
    import torch

    model = CausalLM(ModelSpec.read(default_model), torch.float32, torch.device("cpu"))
    engine = OfflineEngine(settings(default_model, max_rows=3), 2**30, model)
    sequences = requests(default_model, LENGTHS, TOKENS)
    engine.generate(sequences)
    return [sequence.generated for sequence in sequences]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rows", [1, 3])  # hot slots for one block more than the budget of each
@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_the_same_200_tokens(
    hosts: tuple[Host, Host],
    shm: Path,
    keep: Keeper,
    default_model: Path,
    spoken: list[list[int]],
    transport: str,
    rows: int,
) -> None:
    here, there = hosts
    store = keep(
        KvStore(
            shm / "store",
            2**30,
            listen=f"{here.address}:7700",
            lease=10.0,
            flags=flags(transport, here),
            before=here.before,
        )
    )
    sizes = {
        "block_tokens": 2,
        "budget_tokens": 66,
        "hot_tokens": 68,
        "window_tokens": 256,
        "dtype": "float32",
    }
    engine = keep(
        engine_in(there)(
            shm / "e.sock",
            default_model,
            store.address,
            **sizes,
            **ucx_of(transport, there),
            store_access="remote",
            store_seconds=60,
            max_step_tokens=768,
            max_rows=rows,
            max_model_len=1200,
        )
    )
    engine.wait_ready()
    asked = requests(default_model, LENGTHS[:rows], TOKENS)
    begun = time.monotonic()
    for sequence in asked:
        engine.submit(sequence.request_id, sequence.prompt, TOKENS)
    for sequence, expected in zip(asked, spoken, strict=False):
        name = sequence.request_id
        eventually("it ends", lambda name=name: engine.finished(name), 900)  # type: ignore[misc]  # a default
        assert engine.tokens(name) == expected
    layers = engine.stats().layers
    misses, chosen = sum(layer.misses for layer in layers), sum(layer.chosen_blocks for layer in layers)
    print(f"{transport}, batch {rows}: miss rate {misses / chosen:.3f}, {time.monotonic() - begun:.0f} s")
    assert misses > 0.2 * chosen
    eventually("everything is back", engine.idle)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_a_cable_that_is_pulled_out_and_back_in(
    hosts: tuple[Host, Host], shm: Path, keep: Keeper, tmp_path: Path, transport: str
) -> None:
    here, there = hosts
    model = checkpoints.save(tmp_path, "llama", max_position_embeddings=1024)
    rig = Rig(
        keep,
        shm,
        model,
        answers(model, [30, 30, 600]),
        transport,
        store_seconds=2.0,
        store_flags=flags(transport, here),
        listen=f"{here.address}:7700",
        before=here.before,
        engine_kind=engine_in(there),
        **ucx_of(transport, there),
    )
    assert rig.says(0) == ""
    rig.struck(2, lambda: there.link("down"))  # in the middle
    there.link("up")
    rig.until_right(1)
    there.link("down")  # before: it waits
    name = rig.ask(0)
    there.link("up")
    rig.outcome(name)
    rig.until_right(0)
    there.link("down")  # between
    there.link("up")
    rig.until_right(1)  # and then nothing is held

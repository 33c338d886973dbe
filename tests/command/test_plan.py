"""`hotset plan`: counted as the engine counts, timed as was measured, and clear about what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.synthetic import synthetic_config, synthetic_spec
from services.command.__main__ import main
from services.command.plan.cost import Speeds, cost_of, link_speed
from services.command.plan.fit import Machine, Mode, Planner
from services.command.plan.model import PlannedModel, planned_model, spec_of
from services.contract.errors import SetupError
from services.contract.layout import ArenaLayout
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.weights import random_weights
from services.decoder.settings import DecoderSettings
from tests.decoder import checkpoints

GIB = 2**30
ROOT = Path(__file__).resolve().parents[2]
SETTINGS = DecoderSettings.model_validate({"model": Path("planned")})
MODES: tuple[Mode, Mode] = ("full", "tiered")


@pytest.fixture(scope="module")
def qwen() -> PlannedModel:
    """Qwen3-8B's sizes; its context is as long as the benchmarks'."""
    config = synthetic_config("qwen3-8b")
    config.max_position_embeddings = 131072
    return planned_model(synthetic_spec(config))


def planner(model: PlannedModel, gpu: int = 139 * GIB, host: int = 512 * GIB) -> Planner:
    return Planner(SETTINGS, model.spec, model.weight_bytes, Machine(gpu, host, GIB))


def test_weights_are_those_of_the_model(qwen: PlannedModel) -> None:
    assert qwen.weight_bytes == 2 * 8_190_735_360  # as published
    assert (qwen.expert_bytes, qwen.experts) == (0, 1)
    table = 151936 * 4096 * 2
    assert qwen.read_bytes(1) == qwen.read_bytes(64) == qwen.weight_bytes - table


def test_experts_are_read_as_tokens_come_to_them() -> None:
    spec = synthetic_spec(synthetic_config("qwen3-30b-a3b", layers=2))
    model = planned_model(spec)
    assert (model.experts, model.experts_of_a_token) == (128, 8)
    assert model.expert_bytes == 2 * 128 * 3 * 768 * 2048 * 2
    outside = model.read_bytes(0)
    assert model.read_bytes(1) == pytest.approx(outside + model.expert_bytes / 16)
    assert (
        outside < model.read_bytes(8) < model.read_bytes(10**4) == pytest.approx(outside + model.expert_bytes)
    )


def test_a_loaded_model_has_the_same_bytes(tmp_path: Path) -> None:
    spec = spec_of(str(checkpoints.save(tmp_path, "llama")), [])
    cpu = torch.device("cpu")
    loaded = CausalLM(spec, torch.bfloat16, cpu, model=random_weights(spec, torch.bfloat16, cpu, 0))
    assert planned_model(spec).weight_bytes == loaded.weight_bytes


@pytest.mark.parametrize(("rows", "context"), [(1, 8192), (8, 32768), (64, 4096), (3, 131072), (1024, 100)])
def test_it_counts_as_the_engine_counts(qwen: PlannedModel, rows: int, context: int) -> None:
    """With the bytes that the plan asks for the engine gives every row its floor; with fewer it does not."""
    plans = planner(qwen)
    full, tiered = (plans.fit(mode, rows, context) for mode in MODES)
    engine = plans.plan("full", rows, context)
    counted = engine.resident_bytes + engine.index_bytes + engine.table_bytes
    counted += engine.window_bytes + engine.sampling_bytes + engine.weight_bytes
    assert full.device_bytes == counted
    assert full.parts["KV, resident"] == rows * -(-context // 64) * 64 * 147_456

    def held(room: int) -> float:
        """Rows whose floor the engine's hot buffer holds."""
        try:
            plan = plans.plan("tiered", rows, context, room)
        except SetupError:
            return 0
        return min(each.parcels / each.floor for each in plan.hot_classes)

    room = tiered.device_bytes - qwen.weight_bytes
    assert held(room) == rows
    assert held(room - 1) < rows


def test_the_arena_holds_every_row_and_a_page_more(qwen: PlannedModel) -> None:
    plans = planner(qwen)
    layout = plans.arena(8, 1000)
    assert layout.page_count == 8 * 17
    fitted = ArenaLayout.fit(layout.arena_bytes, 64, layout.planes)
    assert fitted.page_count == layout.page_count, "the store lays the same bytes out to the same pages"
    assert plans.fit("tiered", 8, 1000).host_bytes == layout.end


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("gpu", "host"), [(80, 512), (24, 64), (139, 40)])
def test_the_border_is_where_it_says(qwen: PlannedModel, mode: Mode, gpu: int, host: int) -> None:
    plans = planner(qwen, gpu * GIB, host * GIB)
    rows = plans.most_rows(mode, 16384)
    assert rows > 0
    assert plans.fit(mode, rows, 16384).fits
    assert not plans.fit(mode, rows + 1, 16384).fits
    longest = plans.longest(mode, 8)
    assert plans.fit(mode, 8, longest).fits
    assert longest == 131072 or not plans.fit(mode, 8, longest + 64).fits


def test_the_card_that_it_asks_for_is_enough(qwen: PlannedModel) -> None:
    small = planner(qwen, 20 * GIB).fit("tiered", 32, 32768)
    assert not small.fits
    assert planner(qwen, small.card_bytes).fit("tiered", 32, 32768).fits
    assert not planner(qwen, small.card_bytes - 100).fit("tiered", 32, 32768).fits


def test_rows_have_what_memory_is_left(qwen: PlannedModel) -> None:
    assert planner(qwen).fit("tiered", 8, 32768).row_tokens == 32768
    crowded = planner(qwen).fit("tiered", 64, 65536).row_tokens
    assert SETTINGS.floor_tokens <= crowded < 65536


MEASURED = json.loads((ROOT / "benchmarks/results/decode.json").read_text())["rows"]


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['mode']} {row['batch']}x{row['context']}")
def test_times_are_those_that_were_measured(qwen: PlannedModel, row: dict[str, float]) -> None:
    """docs/speed.md's table of decode, whose rows had slots for twice the budget, in a small arena."""
    plans = planner(qwen)
    mode: Mode = "full" if str(row["mode"]) == "full" else "tiered"
    fit = plans.fit(mode, int(row["batch"]), int(row["context"]))
    fit = replace(fit, row_tokens=2 * SETTINGS.budget_tokens, host_bytes=GIB)
    cost = cost_of(fit, qwen, SETTINGS, plans.shape, Speeds(miss_rate=row["miss_rate"]))
    assert cost.tpot_ms == pytest.approx(row["tpot_ms"], rel=0.1)
    if mode == "tiered":
        assert cost.link_ms == pytest.approx(row["exposed_fetch_ms"], rel=0.15)


def test_a_row_that_is_resident_misses_nothing(qwen: PlannedModel) -> None:
    plans = planner(qwen)
    cost = cost_of(plans.fit("tiered", 1, 8192), qwen, SETTINGS, plans.shape, Speeds())
    assert (cost.miss_rate, cost.link_ms, cost.link_share) == (0, 0, 0)


@pytest.mark.parametrize(
    ("gib", "speed"), [(0.1, 48), (1, 48), (2.5, 47), (4, 46), (12, 37), (40, 31), (500, 31)]
)
def test_the_link_slows_down_as_records_spread(gib: float, speed: float) -> None:
    assert link_speed(gib * GIB) == pytest.approx(speed)


SMALL = ["llama", "--set", "num_hidden_layers=2", "--set", "hidden_size=64", "--set", "num_attention_heads=4"]
SMALL += [
    "--set",
    "num_key_value_heads=2",
    "--set",
    "vocab_size=1000",
    "--set",
    "max_position_embeddings=8192",
]
ROOM = ["--gpu-memory", "4GiB", "--host-memory", "4GiB"]


def test_the_table_and_the_json_agree(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", *SMALL, *ROOM, "--rows", "4", "--context", "4096", "--budget-tokens", "512"]
    assert main(asked) == 0
    table = capsys.readouterr().out
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["modes"]["tiered"]["fits"] is True
    assert told["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    [rows] = [line for line in table.splitlines() if line.startswith("rows of that length that fit")]
    assert [int(word.replace(",", "")) for word in rows.split()[-2:]] == [
        told["modes"][mode]["rows_that_fit"] for mode in MODES
    ]
    [fits] = [line for line in table.splitlines() if line.startswith("fits")]
    assert fits.split()[1:] == ["yes", "yes"]


def test_where_nothing_fits_it_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", *SMALL, "--rows", "4", "--context", "4096"]
    assert main([*asked, "--gpu-memory", "1GiB", "--host-memory", "1MiB"]) == 1
    told = capsys.readouterr().out
    assert "NO" in told
    assert "tiered lacks" in told
    [gpu, host] = told.split("tiered lacks")[1].split("It would fit with ")[1].split(".\n")[0].split(" and ")
    assert main([*asked, *gpu.split(), *host.split()]) == 0


def test_where_fewer_fit_it_says_how_many(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", *SMALL, "--gpu-memory", "4GiB", "--host-memory", "8MiB", "--context", "2048"]
    assert main([*asked, "--rows", "64"]) == 0
    rows = capsys.readouterr().out.split("tiered lacks")[1].split("--rows ")[1].split(",")[0]
    assert main([*asked, "--rows", rows]) == 0
    assert "tiered lacks" not in capsys.readouterr().out


def _config(text: str) -> Callable[[Path], str]:
    def write(directory: Path) -> str:
        (directory / "config.json").write_text(text)
        return str(directory)

    return write


REFUSED: dict[str, tuple[Callable[[Path], str], list[str], str]] = {
    "nothing there": (lambda place: str(place / "no"), [], "is no checkpoint's directory and no config.json"),
    "an empty directory": (str, [], "is no checkpoint's directory and no config.json"),
    "not JSON": (_config("{nope"), [], "config.json is not JSON"),
    "JSON of another kind": (_config("[1]"), [], "it holds no object"),
    "no type": (_config('{"num_hidden_layers": 2}'), [], "model type None is not supported"),
    "another type": (_config('{"model_type": "bert"}'), [], "'bert' is not supported; supported:"),
    "no sizes": (
        _config('{"model_type": "llama", "hidden_size": 64, "vocab_size": 9}'),
        [],
        "lacks num_hidden_layers, num_attention_heads, max_position_embeddings; add what is missing: --set",
    ),
    "a size of another type": (lambda _: "llama", ["--set", "num_hidden_layers=many"], "refuses these sizes"),
    "an unknown field": (
        lambda _: "llama",
        ["--set", "num_hiden_layers=2"],
        "did you mean num_hidden_layers?",
    ),
    "no value": (lambda _: "llama", ["--set", "num_hidden_layers"], "write it as --set num_hidden_layers=32"),
    "too long": (lambda _: "llama", ["--context", "9999999"], "exceeds the model's"),
    "no rows": (lambda _: "llama", ["--rows", "0"], "--rows 0 is less than 1"),
    "too many rows": (lambda _: "llama", ["--rows", "2000"], "an engine runs 1024 at most"),
    "no share": (lambda _: "llama", ["--miss-rate", "7"], "write 0.07 for 7%"),
    "no speed": (lambda _: "llama", ["--link-gbps", "0"], "--link-gbps 0.0 is no speed"),
    "no flag": (lambda _: "llama", ["--contxt", "9"], "--contxt"),
    "a flag that the model does not take": (
        lambda _: "glm_moe_dsa",
        ["--block-tokens", "16"],
        "model's own indexer chooses",
    ),
    "a wrong flag of the decoder": (lambda _: "llama", ["--budget-tokens", "7"], "budget_tokens"),
}


@pytest.mark.parametrize(("model", "flags", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused(
    model: Callable[[Path], str],
    flags: list[str],
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", model(tmp_path), *ROOM, *flags]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: ")
    assert reason in told.err


def test_a_machine_without_a_gpu_wants_to_be_told(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["plan", *SMALL]) == 2
    assert "--gpu-memory 80GiB" in capsys.readouterr().err


def test_a_model_with_its_own_indexer(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "vocab_size": 1000,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "index_topk": 256,
    }
    changes = [part for name, value in sizes.items() for part in ("--set", f"{name}={value}")]
    assert main(["plan", "deepseek_v32", *changes, *ROOM, "--context", "2048", "--rows", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kv_bytes_per_token"] == 2 * 576 * 2
    tiered = told["modes"]["tiered"]
    assert tiered["parts"]["selector's index"] == 2 * 2 * 2048 * 128 * 2

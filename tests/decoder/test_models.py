"""Every architecture that is served answers as transformers' own attention does; the others are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from services.contract.errors import SetupError
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.spec import ModelSpec
from services.decoder.settings import DecoderSettings
from tests.decoder import checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
ARENA_BYTES = 16 * 2**20


def ours(path: Path, prompts: list[list[int]], tokens: int, **changes: object) -> list[Sequence]:
    """Answers of an engine whose budget covers everything, prompts in chunks, all rows together."""
    base = {"model": path, "dtype": "float32", "max_rows": 3, "max_step_tokens": 48, "budget_tokens": 512}
    engine = OfflineEngine(DecoderSettings.model_validate(base | changes), ARENA_BYTES)
    sequences = [
        Sequence(str(i), 0, prompt, Sampling(logprobs=True), seed=0, max_tokens=tokens)
        for i, prompt in enumerate(prompts)
    ]
    engine.generate(sequences)
    engine.scheduler.check_integrity()
    return sequences


def theirs(path: Path, prompt: list[int], tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            eos_token_id=-1,
            do_sample=False,
        )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


@pytest.mark.parametrize("model_type", checkpoints.GQA_TYPES)
def test_a_served_architecture_answers_as_transformers_does(tmp_path: Path, model_type: str) -> None:
    path = checkpoints.save(tmp_path, model_type)
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 211, (length,), generator=draw).tolist() for length in (70, 5, 33)]
    answers = [sequence.generated for sequence in ours(path, prompts, 12)]
    assert answers == [theirs(path, prompt, 12) for prompt in prompts]
    assert len({tuple(answer) for answer in answers}) == 3, "an answer that depends on nothing proves nothing"


@pytest.mark.parametrize("model_type", ["qwen3", "granite"])
def test_log_probabilities_are_transformers(tmp_path: Path, model_type: str) -> None:
    """Scaling of attention and of logits included, which an argmax would not notice."""
    path = checkpoints.save(tmp_path, model_type)
    prompt = torch.randint(3, 211, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    [sequence] = ours(path, [prompt], 4)
    sampling = Sampling(prompt_logprobs=True)
    engine = OfflineEngine(
        DecoderSettings.model_validate(
            {"model": path, "dtype": "float32", "max_step_tokens": 24, "budget_tokens": 512}
        ),
        ARENA_BYTES,
    )
    scored = Sequence("r", 0, prompt + sequence.generated, sampling, seed=0, max_tokens=0)
    engine.generate([scored])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits = model(torch.tensor([scored.prompt])).logits[0].log_softmax(1)
    expected = [float(logits[at, token]) for at, token in enumerate(scored.prompt[1:])]
    got = [token.logprob for token in scored.prompt_logprobs]
    assert got[0] is None
    assert got[1:] == pytest.approx(expected, abs=1e-4)


def test_the_spec_reads_sizes_and_ends(tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, "qwen3")
    spec = ModelSpec.read(path)
    assert (spec.layers, spec.query_heads, spec.kv_heads, spec.head_dim) == (3, 6, 2, 32)
    assert (spec.vocab_size, spec.max_positions, spec.eos_token_ids) == (211, 512, (2,))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert ModelSpec.read(path).eos_token_ids == (5, 6)


def test_the_digest_follows_config_and_weights(tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, "llama")
    first = ModelSpec.read(path).weights_digest
    assert ModelSpec.read(path).weights_digest == first
    weights = path / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-3] ^= 1
    weights.write_bytes(changed)
    second = ModelSpec.read(path).weights_digest
    change_config(rope_theta=5.0)(path)
    assert len({first, second, ModelSpec.read(path).weights_digest}) == 3


def change_config(**changes: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def write_config(text: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        (path / "config.json").write_text(text)

    return write


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
REFUSED: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "no config": ("llama", remove("config.json"), "has no config.json"),
    "no weights": ("llama", remove("model.safetensors"), r"no \*\.safetensors; convert"),
    "not json": ("llama", write_config("{nope"), r"config\.json is not JSON"),
    "json of another kind": ("llama", write_config("[1, 2]"), r"config\.json is not JSON of a model"),
    "no type": (
        "llama",
        change_config(model_type=None),
        "model type None is not supported; supported: deepseek_v32, ",
    ),
    "unknown type": ("llama", change_config(model_type="mamba9"), "model type 'mamba9' is not supported"),
    "encoder-decoder": ("llama", change_config(model_type="t5"), "model type 't5' is not supported"),
    "other attention": ("llama", change_config(model_type="gemma2"), "model type 'gemma2' is not supported"),
    "sliding window": ("mistral", change_config(sliding_window=128), "sliding"),
    "some layers slide": (
        "qwen2",
        change_config(use_sliding_window=True, sliding_window=64, layer_types=None, max_window_layers=1),
        "sliding",
    ),
    "softcap": ("llama", change_config(attn_logit_softcapping=50.0), "it uses attn_logit_softcapping"),
    "chunked attention": ("llama", change_config(attention_chunk_size=64), "it uses attention_chunk_size"),
    "quantised": (
        "llama",
        change_config(quantization_config={"quant_method": "gptq", "bits": 4}),
        "quantised; save them dequantised",
    ),
    "dynamic rope": (
        "llama",
        change_config(rope_parameters=YARN | {"rope_type": "dynamic"}),
        "its dynamic rope changes with the length",
    ),
    "dynamic rope of old": (
        "llama",
        change_config(rope_parameters=None, rope_scaling={"type": "dynamic", "factor": 2.0}),
        "its dynamic rope changes with the length",
    ),
    "sizes of the wrong kind": (
        "llama",
        change_config(num_hidden_layers="many"),
        "transformers refuses .*num_hidden_layers",
    ),
    "heads that do not divide": (
        "llama",
        change_config(num_key_value_heads=4),
        "6 query heads .* 4 KV heads",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_checkpoint_that_would_be_computed_wrongly_is_refused(tmp_path: Path, name: str) -> None:
    model_type, spoil, message = REFUSED[name]
    path = checkpoints.save(tmp_path, model_type)
    ModelSpec.read(path)
    spoil(path)
    with pytest.raises(SetupError, match=message):
        ModelSpec.read(path)


def test_a_rope_that_does_not_change_with_the_length_is_served(tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, "llama", rope_parameters=YARN)
    prompt = torch.randint(3, 211, (200,), generator=torch.Generator().manual_seed(3)).tolist()
    [sequence] = ours(path, [prompt], 10)
    assert sequence.generated == theirs(path, prompt, 10)


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    """transformers would fill them with random numbers and go on."""
    path = checkpoints.save(tmp_path, "llama")
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(SetupError, match=r"lacks 1 weights, model\.layers\.1\.mlp\.up_proj\.weight"):
        CausalLM(ModelSpec.read(path), torch.float32, CPU)

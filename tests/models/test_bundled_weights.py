"""The converted weights and config, against transformers' own GGUF loader and in use."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from services.decoder.models.bundled.convert_weights import checkpoint_name, rope_halves


def test_every_tensor_equals_the_one_transformers_reads(default_model: Path, gguf: Path) -> None:
    config = AutoConfig.from_pretrained(default_model)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # theirs
    read = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=empty)  # type: ignore[no-untyped-call]  # theirs
    theirs: dict[str, torch.Tensor] = read["tensors"]
    ours = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32).state_dict()

    assert ours.keys() - theirs.keys() == {"lm_head.weight"}  # tied
    assert torch.equal(ours["lm_head.weight"], ours["model.embed_tokens.weight"])
    assert theirs.keys() <= ours.keys()
    different = [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)]
    assert different == []


def test_config_says_what_the_gguf_says(default_model: Path, gguf: Path) -> None:
    theirs = load_gguf_checkpoint(gguf)["config"]  # type: ignore[no-untyped-call]  # theirs
    ours = json.loads((default_model / "config.json").read_text())
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert ours[key] == theirs[key]
    for key in ("num_key_value_heads", "max_position_embeddings", "vocab_size", "tie_word_embeddings"):
        assert ours[key] == theirs[key]
    assert ours["rms_norm_eps"] == pytest.approx(theirs["rms_norm_eps"], rel=1e-6)
    config = AutoConfig.from_pretrained(default_model)
    assert config.rope_parameters["rope_theta"] == 100_000.0
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert config.max_position_embeddings == 8192


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_answers_paris(default_model: Path, dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(default_model, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(default_model)
    assert model.dtype == dtype
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    prompt = torch.tensor([tokenizer.encode(str(text), add_special_tokens=False)])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False
    )
    answer = tokenizer.decode(output[0, prompt.shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_rope_halves_undoes_the_interleaving() -> None:
    heads, head_dim, width = 3, 8, 5
    rows = np.arange(heads * head_dim * width, dtype=np.float32).reshape(heads * head_dim, width)
    interleaved = np.empty_like(rows)
    for head in range(heads):  # row by row, as the file's format is described
        for pair in range(head_dim // 2):
            start = head * head_dim
            interleaved[start + 2 * pair] = rows[start + pair]
            interleaved[start + 2 * pair + 1] = rows[start + head_dim // 2 + pair]
    assert np.array_equal(rope_halves(interleaved, heads), rows)


def test_an_unknown_tensor_is_not_dropped_in_silence() -> None:
    assert checkpoint_name("blk.12.ffn_gate.weight") == "model.layers.12.mlp.gate_proj.weight"
    assert checkpoint_name("output_norm.weight") == "model.norm.weight"
    for name in ("blk.0.attn_rot.weight", "rope_freqs.weight", "blk.0.attn_q.bias"):
        with pytest.raises(KeyError):
            checkpoint_name(name)

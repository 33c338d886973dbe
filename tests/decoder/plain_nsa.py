"""NSA by its formulas over a whole sequence, with dense masks: the tests' oracle.

Runs inside transformers' own Llama layers, behind its attention interface. Nothing of hotset's attention is
used but the weights of its module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from services.decoder.models.nsa import NsaAttention, NsaConfig, register

Choices = dict[tuple[int, int, int], set[int]]  # (layer, position, KV head) -> blocks
_NAME = "plain_nsa"


def attend(
    module: NsaAttention, query: Tensor, key: Tensor, value: Tensor, gates: Tensor, noted: Choices
) -> Tensor:
    """[heads, T, dim] and [kv_heads, T, dim] -> [T, heads, dim]."""
    config = module.config
    assert isinstance(config, NsaConfig)
    size, tokens = config.nsa_block_tokens, config.nsa_compress_tokens
    heads, length, dim = query.shape
    gate = gates.view(length, 3, heads)
    position = torch.arange(length)
    causal = position <= position.unsqueeze(1)
    near = causal & (position > position.unsqueeze(1) - config.nsa_window_tokens)
    count = length // tokens
    complete = (torch.arange(count) + 1) * tokens <= position.unsqueeze(1) + 1  # [T, entries]
    outs = []
    for head in range(heads):
        group = head * key.shape[0] // heads
        if head % (heads // key.shape[0]) == 0:
            mine = query[head : head + heads // key.shape[0]]
            small_key, small_value = (
                (side[: count * tokens].view(count, tokens, dim) * weight.view(1, tokens, 1)).sum(1)
                for side, weight in zip(
                    (key[group], value[group]), module.compress_weights[:, group], strict=True
                )
            )
            shares = softmax(mine @ small_key.t() * module.scaling, complete)  # [heads of it, T, entries]
            picked = torch.zeros(length, length, dtype=torch.bool)
            for at in range(length):
                score = [0.0] * (at // size + 1)
                for entry in range((at + 1) // tokens):
                    score[entry * tokens // size] += float(shares[:, at, entry].sum())
                score[-1] = float("inf")
                ranked = sorted(range(len(score)), key=lambda block: (-score[block], block))
                chosen = set(ranked[: config.nsa_top_k])
                noted[module.layer_idx or 0, at, group] = chosen
                for block in chosen:
                    picked[at, block * size : (block + 1) * size] = True
        scores = query[head] @ key[group].t() * module.scaling
        branches = (
            softmax(scores, picked & causal) @ value[group],
            shares[head % (heads // key.shape[0])] @ small_value,
            softmax(scores, near) @ value[group],
        )
        outs.append(sum(gate[:, number, head, None] * branch for number, branch in enumerate(branches)))
    return torch.stack([torch.as_tensor(out) for out in outs], dim=1)


def softmax(scores: Tensor, seen: Tensor) -> Tensor:
    """Over what is seen; zeros where nothing is."""
    return scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0)


@contextmanager
def noting() -> Iterator[Choices]:
    """While it lasts, models whose attention is `plain_nsa` note their choices."""
    noted: Choices = {}

    def interface(
        module: NsaAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object,
        *,
        branch_gates: Tensor,
        **more: object,
    ) -> tuple[Tensor, None]:
        return attend(module, query[0], key[0], value[0], branch_gates[0], noted).unsqueeze(0), None

    AttentionInterface.register(_NAME, interface)
    yield noted


def scores_of(path: Path, ids: list[int]) -> tuple[Tensor, Choices]:
    """[T, vocab] logits of a checkpoint over a whole sequence, and what was chosen."""
    register()
    with noting() as noted, torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=_NAME)
        return model(torch.tensor([ids]), use_cache=False).logits[0], noted

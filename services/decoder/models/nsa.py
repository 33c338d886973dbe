"""Native sparse attention as a model: Llama's layers with three gated branches (arXiv 2502.11089).

An architecture of our own, `nsa`: no checkpoint of transformers has it. Every branch reads the same keys and
values. Knows weights and what is handed to the attention; not how blocks are chosen or where they lie.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

BRANCHES = 3  # of chosen blocks, of compressed entries, of the window: the order of a token's gates


class NsaConfig(LlamaConfig):  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    """Llama's, and what is chosen."""

    model_type = "nsa"
    nsa_block_tokens: int = 64
    nsa_top_k: int = 16  # blocks a KV head
    nsa_compress_tokens: int = 16  # of an entry; divides a block
    nsa_window_tokens: int = 512


class NsaAttention(LlamaAttention):
    """One layer's: Llama's projections, a gate a head and branch, and the weights that compress."""

    def __init__(self, config: NsaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        heads, tokens = config.num_attention_heads, config.nsa_compress_tokens
        kv_heads = config.num_key_value_heads or heads
        self.branch_gates = nn.Linear(config.hidden_size, BRANCHES * heads)
        # Of keys and of values, by KV head and token of an entry; it begins as a mean.
        self.compress_weights = nn.Parameter(torch.full((2, kv_heads, tokens), 1 / tokens))

    def forward(self, hidden_states: Tensor, **more: object) -> tuple[Tensor, Tensor | None]:
        """Llama's, with the gates for whoever attends: `[1, tokens, branches * heads]`."""
        gates = self.branch_gates(hidden_states).sigmoid()
        found: tuple[Tensor, Tensor | None] = super().forward(hidden_states, branch_gates=gates, **more)
        return found


class NsaForCausalLM(LlamaForCausalLM):  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    """Llama around NsaAttention."""

    config_class = NsaConfig

    def __init__(self, config: NsaConfig) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = NsaAttention(config, number)
        self.post_init()  # type: ignore[no-untyped-call]  # transformers leaves it untyped


def register() -> None:
    """Make the architecture known to transformers, whose registry is the process's."""
    AutoConfig.register(NsaConfig.model_type, NsaConfig, exist_ok=True)
    AutoModelForCausalLM.register(NsaConfig, NsaForCausalLM, exist_ok=True)

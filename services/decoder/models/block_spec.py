"""The sizes of a model that chooses blocks by itself, read from its config.

Knows configs of `nsa` and `minimax_m3_vl_text`, not weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedConfig

BLOCK_TYPES = ("minimax_m3_vl_text", "nsa")
"""Model types that choose blocks, in prefill too; each is tested."""
_DENSE, _SPARSE = "full_attention", "minimax_m3_sparse"


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """What a layer chooses, and what it looks at for that."""

    selector: Literal["nsa", "block_index"]
    block_tokens: int
    top_k: int  # blocks of a KV head, its newest token's own among them
    window_tokens: int  # newest tokens that are attended to beside the choice; 0 = no window
    entry_elements: int  # of a block in the index, all KV heads
    compress_tokens: int  # of an NSA entry; 0 = the index has keys of tokens
    dense_layers: int  # first layers that attend to everything

    @property
    def read_blocks(self) -> int:
        """Blocks of a KV head that a step reads at most, those of the window included."""
        window = -(-(self.window_tokens - 1) // self.block_tokens) + 1 if self.window_tokens else 0
        return self.top_k + window

    @classmethod
    def of(cls, config: PreTrainedConfig) -> BlockSpec | None:
        """The sizes; None for a model that does not choose blocks."""
        if config.model_type == "nsa":
            entries = config.nsa_block_tokens // config.nsa_compress_tokens
            head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
            return cls(
                selector="nsa",
                block_tokens=config.nsa_block_tokens,
                top_k=config.nsa_top_k,
                window_tokens=config.nsa_window_tokens,
                entry_elements=entries * 2 * config.num_key_value_heads * head_dim,
                compress_tokens=config.nsa_compress_tokens,
                dense_layers=0,
            )
        if config.model_type == "minimax_m3_vl_text":
            return cls(
                selector="block_index",
                block_tokens=config.index_block_size,
                top_k=config.index_topk_blocks,
                window_tokens=0,
                entry_elements=config.index_block_size * config.index_head_dim,
                compress_tokens=0,
                dense_layers=list(config.layer_types).count(_DENSE),
            )
        return None


def block_refusal(config: PreTrainedConfig) -> str | None:
    """Why a config of BLOCK_TYPES would be computed wrongly; None if it would not."""
    if config.model_type == "nsa":
        sizes = config.nsa_block_tokens, config.nsa_top_k, config.nsa_compress_tokens
        if min(sizes) < 1 or config.nsa_window_tokens < 1 or sizes[0] % sizes[2]:
            return "nsa_compress_tokens must divide nsa_block_tokens, and all its nsa_ numbers be positive"
        return None
    kinds = list(config.layer_types)
    dense = kinds.count(_DENSE)
    if kinds != [_DENSE] * dense + [_SPARSE] * (config.num_hidden_layers - dense):
        return f"its layer_types must be {_DENSE} first, then {_SPARSE}: {kinds}"
    if dense == len(kinds):
        return f"none of its layers is {_SPARSE}"
    if config.index_n_heads != config.num_key_value_heads:
        return f"it has {config.index_n_heads} index heads for {config.num_key_value_heads} KV heads"
    if config.index_local_blocks != 1:
        return f"index_local_blocks is {config.index_local_blocks}; only a token's own block is always chosen"
    return None

"""Our attention behind transformers' attention interface.

Knows the interface's calling convention; the Step that arrives as a keyword does the work.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import AttentionInterface

from services.decoder.attention.block_selector import BlockInput
from services.decoder.attention.block_step import BlockStep
from services.decoder.attention.step import Step
from services.decoder.models import nsa
from services.decoder.models.block_attention import attend_gated

ATTENTION_NAME = "hotset"


def hotset_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step: Step,
    layer_idx: int | None = None,
    scaling: float,
    branch_gates: Tensor | None = None,
    block_indices: BlockInput | None = None,
    **_unused: object,  # the interface passes more than we need: dropout, position_ids, cache flags
) -> tuple[Tensor, None]:
    """One layer's attention over a packed batch.

    Args:
        module: the layer's attention module; its `layer_idx` says which layer calls.
        query: [1, query heads, tokens, head_dim], after rope.
        key: [1, kv_heads, tokens, head_dim], after rope.
        value: the same shape as `key`.
        attention_mask: None; the step knows who sees what.
        step: this forward pass.
        layer_idx: unused; models that pass it agree with the module.
        scaling: factor on q.k.
        branch_gates: of NSA, [1, tokens, branches * query heads].
        block_indices: what the indexer made of the tokens, in a layer of MiniMax-M3 that has one.

    Returns:
        [1, tokens, query heads, head_dim], and no weights.
    """
    if attention_mask is not None:
        raise ValueError("transformers built an attention mask for hotset; this version is not supported")
    number = module.layer_idx
    assert isinstance(number, int)
    query, key, value = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
    if isinstance(module, nsa.NsaAttention):
        assert isinstance(step, BlockStep)
        assert branch_gates is not None, "the module made them"
        weights = module.compress_weights
        out = attend_gated(step, number, query, key, value, scaling, branch_gates.squeeze(0), weights)
    elif block_indices is not None:
        assert isinstance(step, BlockStep)
        [out] = step.attend_blocks(number, query, key, value, block_indices, scaling)
    else:
        out = step.attend(number, query, key, value, scaling)
    return out.unsqueeze(0), None


def register() -> None:
    """Make the attention and NSA known to transformers, whose registries are the process's."""
    nsa.register()
    AttentionInterface.register(ATTENTION_NAME, hotset_attention)

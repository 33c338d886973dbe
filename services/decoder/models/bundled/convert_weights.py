"""model.safetensors from the GGUF's tensors: dequantised, renamed, q and k rows put back in order.

Knows the llama architecture's tensors. Values stay float32, so nothing is lost: a Q4_1 value is
`scale x q + minimum` with float16 scale and minimum, which neither bfloat16 nor float16 holds.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file

from services.contract.progress import Progress
from services.decoder.models.bundled.convert_config import metadata

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def write_weights(reader: GGUFReader, target: Path) -> None:
    """Write model.safetensors into the directory `target`, every tensor float32, [out, in] as torch has it.

    Raises:
        KeyError: a tensor that a llama model does not have.
        OSError: the file cannot be written.
    """
    heads = {
        "attn_q": metadata(reader, "llama.attention.head_count"),
        "attn_k": metadata(reader, "llama.attention.head_count_kv"),
    }
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    with Progress("default model: converting weights", len(reader.tensors), "tensors") as progress:
        for tensor in reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            part = tensor.name.split(".")[-2]
            if part in heads:
                values = rope_halves(values, heads[part])
            tensors[checkpoint_name(tensor.name)] = np.ascontiguousarray(values)
            progress.add(1)
    # The metadata is what transformers looks for; it says that names and shapes are those of torch.
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def checkpoint_name(name: str) -> str:
    """Hugging Face's name of a GGUF llama tensor: `blk.3.attn_q.weight` -> `model.layers.3.self_attn...`.

    Raises:
        KeyError: no such tensor in a llama model.
    """
    if block := _BLOCK.fullmatch(name):
        return f"model.layers.{block[1]}.{_INNER[block[2]]}.weight"
    return f"{_OUTER[name.removesuffix('.weight')]}.weight"


def rope_halves(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of a q or k projection in the order that Hugging Face's rotary embedding expects.

    GGUF keeps the two rows of a rotated pair side by side (pairs 0, 1, 2, ...); Hugging Face rotates the
    first half of a head against the second. So row 2i goes to i, and row 2i + 1 to head_dim / 2 + i.

    Args:
        rows: [heads x head_dim, in].
        heads: query heads for q, KV heads for k.
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])  # [head, pair, which of the two, in]
    return pairs.swapaxes(1, 2).reshape(rows.shape)

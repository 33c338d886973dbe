"""tokenizer.json, tokenizer_config.json and special_tokens_map.json from the GGUF's vocabulary and merges.

Knows SmolLM2's pre-tokenizer, which a GGUF only names ("smollm"): every numeral is a piece of its own,
then GPT-2's byte-level split. Without the first step a run of whitespace before a digit falls apart:
two line feeds before a 3 would be two tokens where the model was trained on one.
"""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from services.contract.errors import SetupError
from services.decoder.models.bundled.convert_config import metadata, write_json


def write_tokenizer(reader: GGUFReader, target: Path) -> None:
    """Write the three files into the directory `target`.

    Raises:
        SetupError: the GGUF names another tokenizer than SmolLM2's.
        OSError: a file cannot be written.
    """
    kind = (metadata(reader, "tokenizer.ggml.model"), metadata(reader, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise SetupError(f"the GGUF's tokenizer is {kind}; only ('gpt2', 'smollm') is known")
    tokens: list[str] = metadata(reader, "tokenizer.ggml.tokens")
    kinds: list[int] = metadata(reader, "tokenizer.ggml.token_type")
    merges: list[str] = metadata(reader, "tokenizer.ggml.merges")

    tokenizer = Tokenizer(
        BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[(left, right) for left, right in (merge.split(" ") for merge in merges)],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        token for token, kind in zip(tokens, kinds, strict=True) if TokenType(kind) == TokenType.CONTROL
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(target / "tokenizer.json"))

    names = {
        f"{role}_token": tokens[metadata(reader, f"tokenizer.ggml.{key}_token_id")]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    write_json(target / "special_tokens_map.json", names)
    write_json(
        target / "tokenizer_config.json",
        names
        | {
            "add_bos_token": metadata(reader, "tokenizer.ggml.add_bos_token"),
            "additional_special_tokens": [token for token in special if token not in names.values()],
            "clean_up_tokenization_spaces": False,
            "model_max_length": metadata(reader, "llama.context_length"),
            # Not GPT2Tokenizer: that class would put its own pre-tokenizer in place of tokenizer.json's.
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )

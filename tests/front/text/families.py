"""Small tokenizers of the kinds that language models come with, written as checkpoints' files.

Each is trained here on a few lines, so that it has merges, bytes and special tokens as the real ones do.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The capital of France is Paris. The capital of Spain is Madrid, and that of Italy is Rome.",
    "def main(argument):\n    return [argument for number in range(10)]\n",
    "Größe, café, naïve, 日本語 and 🙂 are text too; so is a b c d e f g.",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>"]
ADDED = ["<tool>", "<〈tool▁call〉>"]
FAMILIES = ("llama2", "gemma", "metaspace", "llama3")


def write_family(name: str, directory: Path) -> Path:
    """Write tokenizer.json and tokenizer_config.json of one family into `directory`."""
    tokenizer = {"llama2": _llama2, "gemma": _gemma, "metaspace": _metaspace, "llama3": _llama3}[name]()
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, object] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def _add_special(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    # The second has characters that a byte-level alphabet lacks, as DeepSeek's special tokens do.
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])


def _begin_with_bos(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )


def _sentencepiece_bpe() -> Tokenizer:
    """BPE over text with ▁ for spaces, and a token for each byte that the vocabulary cannot spell."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(
        [line.replace("日本語", "").replace("🙂", "") for line in CORPUS],
        trainers.BpeTrainer(vocab_size=200, show_progress=False),
    )
    state = json.loads(trained.to_str())["model"]
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *state["vocab"]]
    return Tokenizer(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=[tuple(merge) for merge in state["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )


def _llama2() -> Tokenizer:
    tokenizer = _sentencepiece_bpe()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _add_special(tokenizer)
    _begin_with_bos(tokenizer)
    return tokenizer


def _gemma() -> Tokenizer:
    tokenizer = _sentencepiece_bpe()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    _add_special(tokenizer)
    _begin_with_bos(tokenizer)
    return tokenizer


def _metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
        ),
    )
    _add_special(tokenizer)
    return tokenizer


def _llama3() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    _add_special(tokenizer)
    _begin_with_bos(tokenizer)
    return tokenizer

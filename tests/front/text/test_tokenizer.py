"""Encoding, decoding and special tokens as transformers has them, and broken checkpoints refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from services.contract.errors import InvalidRequest, SetupError
from services.decoder.front.text.tokenizer import TextTokenizer

TEXTS = [
    "",
    " ",
    "The capital of France",
    "  two spaces\n\n\ttab ",
    "Größe 日本語 🙂 👩‍👩‍👧",
    "a</s>b<s><tool> c",
    "<|im_start|>user\n12345<|im_end|>",
    "x <〈tool▁call〉> 日<〈tool▁call〉>",
    "if x <= 10 and y != 'z':",
    "▁ is a character",
]


@pytest.fixture(scope="module")
def theirs(checkpoint: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_encodes_and_decodes_as_transformers(
    tokenizer: TextTokenizer, theirs: PreTrainedTokenizerBase, text: str, special: bool
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=special)
    assert ids == theirs.encode(text, add_special_tokens=special)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_begin_token_only_where_the_tokenizer_says_so(llama2: TextTokenizer, smollm: TextTokenizer) -> None:
    assert llama2.encode("a")[0] == 1
    assert llama2.encode("a", add_special_tokens=False)[0] != 1
    assert smollm.encode("a") == smollm.encode("a", add_special_tokens=False)


def test_special_ids(tokenizer: TextTokenizer, theirs: PreTrainedTokenizerBase) -> None:
    assert tokenizer.special_ids == set(theirs.all_special_ids)
    assert tokenizer.special_tokens["eos_token"] == theirs.eos_token
    assert tokenizer.vocab_size == len(theirs)
    assert tokenizer.eos_ids == {theirs.eos_token_id}


def test_bytes_of_tokens_make_up_the_text(tokenizer: TextTokenizer) -> None:
    text = "x Größe 日本 🙂"
    ids = tokenizer.encode(text, add_special_tokens=False)
    spelled = b"".join(map(tokenizer.bytes_of, ids)).decode()
    assert spelled.removeprefix(" ") == tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer.bytes_of(tokenizer.vocab_size) == b""


def test_a_token_that_is_half_a_character(llama2: TextTokenizer, smollm: TextTokenizer) -> None:
    first, *rest = smollm.encode("🙂")
    assert smollm.bytes_of(first) == b"\xf0\x9f"
    assert b"".join(map(smollm.bytes_of, [first, *rest])) == "🙂".encode()
    byte = llama2.encode("語", add_special_tokens=False)[1]
    assert llama2.bytes_of(byte) == b"\xe8"
    assert smollm.bytes_of(smollm.encode(" world")[0]) == b" world"


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": [2, 7]}, {"eos_token_id": 1}, {2, 7}),
        ({}, {"eos_token_id": 5}, {5}),
        (None, {"eos_token_id": [5]}, {5}),
        ({"eos_token_id": None}, {}, {2}),  # the eos token of tokenizer_config.json
        (None, None, {2}),
        ({"eos_token_id": 0}, None, {0}),
    ],
)
def test_end_ids(
    tmp_path: Path,
    default_model: Path,
    generation: dict[str, object] | None,
    config: dict[str, object] | None,
    ends: set[int],
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(default_model / name, tmp_path)
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        if value is not None:
            (tmp_path / name).write_text(json.dumps(value))
    assert TextTokenizer.from_directory(tmp_path).eos_ids == ends


def test_special_tokens_written_as_objects_and_not_marked(tmp_path: Path, default_model: Path) -> None:
    """A token that the config names is special, though tokenizer.json has it as an ordinary one."""
    shutil.copy(default_model / "tokenizer.json", tmp_path)
    config = {"eos_token": {"content": "Ġworld", "lstrip": False}, "bos_token": None, "pad_token": "<absent>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = TextTokenizer.from_directory(tmp_path)
    world = tokenizer.encode("Ġworld")
    assert tokenizer.eos_ids == set(world)
    assert tokenizer.special_ids == {*range(17), *world}
    assert tokenizer.special_tokens == {"eos_token": "Ġworld", "pad_token": "<absent>"}
    assert tokenizer.vocab_size == 49152


def test_training_limits_in_the_file_do_not_cut_prompts(tmp_path: Path, default_model: Path) -> None:
    stored = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    stored.enable_truncation(max_length=4)
    stored.enable_padding(length=8)
    stored.save(str(tmp_path / "tokenizer.json"))
    assert len(TextTokenizer.from_directory(tmp_path).encode("12345678901")) == 11


def test_half_a_surrogate_pair(smollm: TextTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate pair at character 2"):
        smollm.encode("ab\ud83d")


@pytest.mark.parametrize("bad", [-1, 49152, 10**30])
def test_ids_outside_the_vocabulary(smollm: TextTokenizer, bad: int) -> None:
    smollm.check_ids([0, 49151])
    with pytest.raises(InvalidRequest, match=rf"token id {bad} is not .* 0 to 49151"):
        smollm.check_ids([5, bad])


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"no tokenizer\.json; write one with transformers"):
        TextTokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "\xff"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("generation_config.json", '{"eos_token_id": "2"}'),
        ("config.json", '{"eos_token_id": [true]}'),
    ],
)
def test_broken_files(tmp_path: Path, default_model: Path, name: str, text: str) -> None:
    shutil.copy(default_model / "tokenizer.json", tmp_path)
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(SetupError, match=name):
        TextTokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.Strip(" ", 1, 0), None])
def test_a_decoder_that_is_not_known(
    tmp_path: Path, default_model: Path, decoder: decoders.Decoder | None
) -> None:
    stored = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    stored.decoder = decoder
    stored.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(SetupError, match="decoder"):
        TextTokenizer.from_directory(tmp_path)

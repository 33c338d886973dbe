"""The converted tokenizer, against a table of known tokens and against transformers' GGUF reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

KNOWN = [
    ("12345", ["1", "2", "3", "4", "5"]),
    (" 42", ["Ġ", "4", "2"]),
    ("3.14e10", ["3", ".", "1", "4", "e", "1", "0"]),
    ("2\n\n3", ["2", "ĊĊ", "3"]),  # a run of whitespace stays whole before a digit
    ("a  7", ["a", "ĠĠ", "7"]),
    (" ½²", ["Ġ", "Â½", "Â²"]),  # and so does a space before any other numeral
    ("x1y22z", ["x", "1", "y", "2", "2", "z"]),
    ("Hello, world!", ["Hello", ",", "Ġworld", "!"]),
    ("The capital of France is Paris.", ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis", "ĠParis", "."]),
    ("don't", ["don", "'t"]),
    ("", []),
    (" ", ["Ġ"]),
    ("\n", ["Ċ"]),
    ("\t\t", ["ĉĉ"]),
    ("héllo", ["h", "Ã©", "llo"]),
    ("🙂", ["ðŁ", "ĻĤ"]),
    (" 🙂", ["ĠðŁĻĤ"]),
    ("日本語", ["æĹ", "¥", "æľ¬", "è", "ª", "ŀ"]),
    ("<|im_start|>user\nhi<|im_end|>", ["<|im_start|>", "user", "Ċ", "hi", "<|im_end|>"]),
    ("a<|endoftext|>b", ["a", "<|endoftext|>", "b"]),
    ("<file_sep>1<repo_name>", ["<file_sep>", "1", "<repo_name>"]),
]

SAMPLES = [text for text, _ in KNOWN] + [
    "def f(x):\n    return x[0] + 0x1F  # ²³ ½ ٣\n",
    "    four spaces,\ttab,  two\r\n\r\n   end   ",
    "Ünïcödé ß \u017f İ ǅ \u200d\u00a0\u3000|e\u0301|é",
    "👩‍👩‍👧‍👦🇫🇷 👍🏽",
    "مرحبا بالعالم १२३ 한국어 ไทย",
    "https://example.org/a?b=1&c=%20#d",
    "I'LL we've they'd IT'S 're",
    "<|im_start|><|im_start|>  <|im_end|>\n<|im_end",
]

UNKNOWN_BYTES = "\x04\x06\x13\x14\x16\x1d"  # the vocabulary has no token for these; they vanish


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(default_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def theirs(gguf: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


@pytest.fixture(scope="module")
def auto(default_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(default_model)


@pytest.mark.parametrize(("text", "tokens"), KNOWN)
def test_known_tokens(tokenizer: Tokenizer, text: str, tokens: list[str]) -> None:
    assert tokenizer.encode(text).tokens == tokens


@pytest.mark.parametrize("text", SAMPLES)
def test_same_tokens_as_transformers_reads_from_the_gguf(
    tokenizer: Tokenizer, theirs: PreTrainedTokenizerBase, text: str
) -> None:
    """Numerals are left out: transformers' GGUF reader does not split them off, the table above does."""
    text = "".join(character for character in text if not character.isnumeric())
    assert tokenizer.encode(text).ids == theirs.encode(text)


@pytest.mark.parametrize("text", SAMPLES)
def test_auto_tokenizer_keeps_the_digit_split(
    tokenizer: Tokenizer, auto: PreTrainedTokenizerBase, text: str
) -> None:
    assert auto.encode(text) == tokenizer.encode(text).ids
    assert auto.decode(auto.encode(text)) == text
    assert (auto.bos_token_id, auto.eos_token_id, auto.pad_token_id) == (1, 2, 2)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(
        st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters=UNKNOWN_BYTES)
    )
)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@given(number=st.integers(0, 10**18))
def test_every_digit_is_a_token(tokenizer: Tokenizer, number: int) -> None:
    assert tokenizer.encode(str(number)).tokens == list(str(number))


def test_special_tokens_are_special(tokenizer: Tokenizer, default_model: Path) -> None:
    added = tokenizer.get_added_tokens_decoder()
    assert sorted(added) == list(range(17))
    assert all(token.special for token in added.values())
    assert tokenizer.decode([1, 6004, 2]) == "hi"
    assert tokenizer.decode([1, 6004, 2], skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"
    assert tokenizer.get_vocab_size() == 49152


SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
)
CHATS = [
    ([{"role": "user", "content": "Hi"}], SYSTEM + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
    (
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    ),
    (
        [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "  sure? \n"},
        ],
        SYSTEM + "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\n  sure? \n<|im_end|>\n<|im_start|>assistant\n",
    ),
]


@pytest.mark.parametrize(("messages", "text"), CHATS)
def test_chat_template(auto: PreTrainedTokenizerBase, messages: list[dict[str, str]], text: str) -> None:
    assert auto.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == text

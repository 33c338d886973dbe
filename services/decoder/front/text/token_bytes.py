"""The bytes that each token stands for, so that text can be put together from the bytes of its tokens.

Knows the decoders that causal language models come with: byte-level (GPT-2, Llama 3, Qwen, DeepSeek,
SmolLM) and SentencePiece's, spelled as Replace, ByteFallback, Fuse, Strip or as Metaspace (Llama 2,
Mistral, Gemma, Phi 3). A tokenizer with another one is refused, not guessed at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from services.contract.errors import SetupError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet, character -> byte: printable Latin-1 as itself, the other bytes from U+0100 on."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


@dataclass(frozen=True, slots=True)
class _Rules:
    """What the decoder does to a token."""

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip_spaces: int = 0  # leading spaces that the text as a whole loses, at most
    drop_in_first: str = ""  # a mark that the first token of a text loses


class TokenBytes:
    """The bytes of every token of one tokenizer. Immutable; any thread may use it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read the tokenizer's decoder.

        Raises:
            SetupError: the decoder is none of those known.
        """
        self._tokenizer = tokenizer
        self._alphabet: Mapping[str, int] = _byte_alphabet()
        self._rules = _read_rules(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        """Ids that `skip_special_tokens` leaves out."""

    @property
    def strip_spaces(self) -> int:
        """Leading spaces that a text loses, at most, because encoding put one there."""
        return self._rules.strip_spaces

    def of(self, token_id: int, *, first: bool = False) -> bytes | None:
        """Bytes of a token, perhaps half a character; None for an id that no token has.

        Args:
            token_id: not negative.
            first: whether it is the first token of a text, where some tokenizers drop a leading space.
        """
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return None
        rules = self._rules
        if rules.byte_level:
            try:
                return bytes([self._alphabet[character] for character in token])
            except KeyError:  # an added token, written as it is
                return token.encode()
        for old, new in rules.replacements:
            token = token.replace(old, new)
        if rules.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if rules.drop_in_first:
            token = token.replace(rules.drop_in_first, "" if first else " ")
        return token.encode()


def _read_rules(tokenizer: Tokenizer) -> _Rules:
    # Their pickle is the JSON of tokenizer.json; reading that file again would take 0.3 s for a large one.
    state = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else b"null"
    decoder: dict[str, Any] | None = json.loads(state)
    parts = [] if decoder is None else decoder.get("decoders", [decoder])
    if [part["type"] for part in parts] == ["ByteLevel"]:
        return _Rules(byte_level=True)
    replacements: list[tuple[str, str]] = []
    byte_fallback, fused, strip_spaces, drop_in_first = False, False, 0, ""
    for part in parts:
        match part:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": int(count), "stop": 0} if fused:
                strip_spaces = count
            case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": "never"}:
                replacements.append((mark, " "))
            case {"type": "Metaspace", "replacement": str(mark)}:
                drop_in_first = mark
            case _:
                raise SetupError(
                    f"the tokenizer's decoder has a step that is not supported: {json.dumps(part)}; known "
                    "are ByteLevel, or Replace (of a string), ByteFallback, Fuse, Strip (of leading spaces) "
                    "and Metaspace"
                )
    if not parts:
        raise SetupError("tokenizer.json has no decoder, so tokens cannot be turned into text")
    return _Rules(False, byte_fallback, tuple(replacements), strip_spaces, drop_in_first)

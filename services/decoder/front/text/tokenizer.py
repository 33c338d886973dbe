"""A checkpoint's tokenizer: encode, decode, and what the front must know of single tokens.

Knows tokenizer.json and the special tokens that the files beside it name. Answers as transformers' fast
tokenizers do: tokenizer.json's own post-processor decides whether a begin token is added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from tokenizers import AddedToken, Tokenizer

from services.contract.errors import InvalidRequest, SetupError
from services.decoder.front.text.checkpoint import eos_ids, special_tokens
from services.decoder.front.text.detokenizer import Detokenizer
from services.decoder.front.text.token_bytes import TokenBytes


class TextTokenizer:
    """Immutable after `from_directory`; any thread may use it, and encoding releases the interpreter."""

    def __init__(self, tokenizer: Tokenizer, named: dict[str, str], ends: frozenset[int]) -> None:
        """Take over `tokenizer`; use `from_directory`.

        Args:
            tokenizer: not used by anyone else.
            named: role -> text of its special tokens, as `checkpoint.special_tokens`.
            ends: ids that end an answer; if empty, that of the eos token.

        Raises:
            SetupError: a decoder that is not known.
        """
        tokenizer.no_truncation()  # a tokenizer.json may keep what it was trained with
        tokenizer.no_padding()
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        missed = [
            text for text in named.values() if text not in special and tokenizer.token_to_id(text) is not None
        ]
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missed])
        self._tokenizer = tokenizer
        self.special_tokens = dict(named)
        """Role -> text, for the chat template."""
        self.token_bytes = TokenBytes(tokenizer)
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        """One past the largest id."""
        eos = self._id_of("eos_token")
        self.eos_ids = ends or frozenset(() if eos is None else (eos,))
        """Ids that end an answer; may be empty."""

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        """The tokenizer of the checkpoint in `directory`.

        Raises:
            SetupError: no tokenizer.json, or one of the files is broken or not supported.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise SetupError(
                f"{directory} has no tokenizer.json; write one with transformers: "
                f"AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained({str(directory)!r})"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for any broken file
            raise SetupError(f"{path} cannot be read: {error}; fetch the checkpoint again") from error
        return cls(tokenizer, special_tokens(directory), eos_ids(directory))

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        return self.token_bytes.special_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it count as such.

        Args:
            text: any text; of megabytes it takes seconds, so not on an event loop.
            add_special_tokens: add what the tokenizer puts around a text, for example a begin token.
                Not for a rendered chat template, which has them already.

        Raises:
            InvalidRequest: half a surrogate pair, which is not a character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text has half a surrogate pair at character {error.start}, which is not valid Unicode"
            ) from error
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids that no token has add nothing.

        Args:
            token_ids: not negative, below 2**32.
            skip_special_tokens: leave special tokens out.
        """
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(self, *, skip_special_tokens: bool = True, continues: bool = False) -> Detokenizer:
        """Begin the text of an answer; the arguments are those of `Detokenizer`."""
        return Detokenizer(self.token_bytes, skip_special_tokens=skip_special_tokens, continues=continues)

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes that a token stands for, perhaps half a character; none for an id that no token has.

        Args:
            token_id: not negative.
        """
        return self.token_bytes.of(token_id) or b""

    def check_ids(self, token_ids: Iterable[int]) -> None:
        """Refuse ids that the vocabulary does not have.

        Raises:
            InvalidRequest: naming the first such id.
        """
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"token id {token_id} is not in the vocabulary; ids run from 0 to {self.vocab_size - 1}"
                )

    def _id_of(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self._tokenizer.token_to_id(text)

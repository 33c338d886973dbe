"""Text from tokens as they come: never half a character, and all of it the same as decoding at the end.

Knows one answer's tokens, nothing of stop strings. It puts together the tokens' bytes rather than using
tokenizers' DecodeStream, which has no way to give up a dangling half at the end, holds back without
limit (and in quadratic time) while bytes are not UTF-8, and cannot say which bytes a token added.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from services.decoder.front.text.token_bytes import TokenBytes


class Detokenizer:
    """The text of one answer. Cost per token does not grow; used by one thread at a time.

    What `feed` and `flush` return, put together, is what `tokenizer.decode` gives for all the ids, with
    one exception: where SentencePiece byte tokens are not UTF-8, decode replaces every byte of the run,
    this only those that are wrong (it has passed on the others already).
    """

    def __init__(
        self, tokens: TokenBytes, *, skip_special_tokens: bool = True, continues: bool = False
    ) -> None:
        """Begin an answer.

        Args:
            tokens: of the tokenizer.
            skip_special_tokens: leave special tokens out of the text.
            continues: whether the text goes on from another, as a completion does from its prompt; then
                a space that the first token stands for is kept, which decoding the answer alone drops.
        """
        self._tokens = tokens
        self._skipped = tokens.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = not continues
        self._spaces_to_strip = 0 if continues else tokens.strip_spaces

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete, perhaps none.

        Args:
            token_ids: the next tokens; ids that no token has add nothing.
        """
        pieces = []
        for token_id in token_ids:
            if token_id in self._skipped:
                continue
            piece = self._tokens.of(token_id, first=self._first)
            if piece is not None:
                pieces.append(piece)
                self._first = False
        return self._strip(self._decoder.decode(b"".join(pieces)))

    def flush(self) -> str:
        """What is left at the end of the answer: U+FFFD for a character that stayed half, or nothing."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._spaces_to_strip and text:
            if not text.startswith(" "):
                self._spaces_to_strip = 0
                break
            text = text[1:]
            self._spaces_to_strip -= 1
        return text

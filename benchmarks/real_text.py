"""Tokens of real prose, as many as are wanted."""

from __future__ import annotations

from tokenizers import Tokenizer

from services.command.bench.prose import real_text


def real_tokens(tokenizer: Tokenizer, count: int, skip: int = 0) -> list[int]:
    """`count` tokens of it, from the `skip`-th on."""
    ids: list[int] = tokenizer.encode(real_text()[: 8 * (skip + count)]).ids
    assert len(ids) >= skip + count
    return ids[skip : skip + count]

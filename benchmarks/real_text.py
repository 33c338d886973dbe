"""Real prose of any length: the language reference that ships inside Python."""

from __future__ import annotations

from pydoc_data.topics import topics

from tokenizers import Tokenizer


def real_text() -> str:
    """All of it, some 110,000 tokens."""
    return "\n".join(topics[name] for name in sorted(topics))


def real_tokens(tokenizer: Tokenizer, count: int, skip: int = 0) -> list[int]:
    """`count` tokens of it, from the `skip`-th on."""
    ids: list[int] = tokenizer.encode(real_text()[: 8 * (skip + count)]).ids
    assert len(ids) >= skip + count
    return ids[skip : skip + count]

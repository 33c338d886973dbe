"""Log probabilities as the two OpenAI shapes tell them. Knows tokens and their text, no engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hotset.v1 import engine_pb2

from services.decoder.front.choice_text import ShownToken
from services.decoder.front.schema.answers import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenLogprob,
    TopTokenLogprob,
)
from services.decoder.front.text.tokenizer import TextTokenizer

LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def token_text(tokenizer: TextTokenizer, token_id: int) -> str:
    r"""A token's text; `bytes:\xe2\x82` for one that is not whole characters, so that no two look alike."""
    raw = tokenizer.bytes_of(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: TextTokenizer, tokens: Iterable[ShownToken], top: int) -> ChatLogprobs:
    """Of these tokens, with their `top` most likely alternatives."""
    return ChatLogprobs(
        content=[
            TokenLogprob(
                token=token_text(tokenizer, shown.token.id),
                logprob=_finite(shown.token.logprob),
                bytes=list(tokenizer.bytes_of(shown.token.id)),
                top_logprobs=[
                    TopTokenLogprob(
                        token=token_text(tokenizer, other.id),
                        logprob=_finite(other.logprob),
                        bytes=list(tokenizer.bytes_of(other.id)),
                    )
                    for other in shown.token.top[:top]
                ],
            )
            for shown in tokens
        ]
    )


def completion_logprobs(
    tokenizer: TextTokenizer, tokens: Sequence[ShownToken], top: int, *, base: int
) -> CompletionLogprobs:
    """Of these tokens; each one's alternatives hold the chosen token too, as OpenAI's do.

    Args:
        tokenizer: of the checkpoint.
        tokens: those to tell.
        top: alternatives told.
        base: characters before the answer's first.
    """
    return CompletionLogprobs(
        tokens=[token_text(tokenizer, shown.token.id) for shown in tokens],
        token_logprobs=[_logprob(shown.token) for shown in tokens],
        top_logprobs=[_alternatives(tokenizer, shown.token, top) for shown in tokens],
        text_offset=[base + shown.offset for shown in tokens],
    )


def _alternatives(tokenizer: TextTokenizer, token: engine_pb2.Token, top: int) -> dict[str, float] | None:
    own = _logprob(token)
    if own is None:
        return None
    told = {token_text(tokenizer, other.id): _finite(other.logprob) for other in token.top[:top]}
    return told | {token_text(tokenizer, token.id): own}


def _logprob(token: engine_pb2.Token) -> float | None:
    return _finite(token.logprob) if token.HasField("logprob") else None


def _finite(logprob: float) -> float:
    return max(logprob, LEAST) if logprob == logprob else LEAST

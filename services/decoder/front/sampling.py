"""A request's fields, turned into what the engine understands, checked against what it can do.

Knows tokens and the wire, no text and no HTTP beside the errors it raises.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

from hotset.v1 import engine_pb2

from services.decoder.front.errors import BadRequest
from services.decoder.front.schema.sampling_fields import SamplingFields

_MASK64 = 2**64 - 1
_SMALLEST = 1.2e-38  # smaller floats would be 0 as float32 on the wire, which means "greedy" or nothing


@dataclass(frozen=True)
class LogprobsWanted:
    """Which log probabilities a client asked for."""

    answer: bool = False
    top: int = 0
    prompt: bool = False


@dataclass(frozen=True)
class Plan:
    """What all prompts of one HTTP request share.

    Attributes:
        seed: of the whole request; `choice_seed` derives each choice's own. None = a random one a prompt.
        most_tokens: of each answer; None = as many as fit.
    """

    sampling: engine_pb2.SamplingParams
    logprobs: LogprobsWanted
    n: int
    seed: int | None
    most_tokens: int | None
    min_tokens: int
    stop_texts: tuple[str, ...]
    keep_stop_text: bool
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    priority: int
    cache_salt: bytes

    def submission(self, request_id: str, prompt: tuple[int, ...], limit: int) -> engine_pb2.SubmitRequest:
        """One prompt's request to the engine; its choices share the prompt.

        Args:
            request_id: unique while it runs.
            prompt: token ids.
            limit: longest prompt + answer, tokens.

        Raises:
            BadRequest: prompt and answer do not fit the limit.
        """
        seed = secrets.randbits(64) if self.seed is None else self.seed
        return engine_pb2.SubmitRequest(
            request_id=request_id,
            prompt_tokens=prompt,
            choices=[engine_pb2.Choice(index=i, seed=choice_seed(seed, i)) for i in range(self.n)],
            sampling=self.sampling,
            max_tokens=answer_tokens(len(prompt), self.most_tokens, limit),
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            priority=self.priority,
            cache_salt=self.cache_salt,
        )


def make_plan(
    fields: SamplingFields,
    logprobs: LogprobsWanted,
    *,
    default_most_tokens: int | None,
    vocab_size: int,
    tenant: bytes,
) -> Plan:
    """The plan that `fields` amount to.

    Args:
        fields: as the client sent them.
        logprobs: what the route makes of its own logprobs fields.
        default_most_tokens: where the client names none; None = as many as fit.
        vocab_size: ids from 0 up to this exist.
        tenant: prefixes are shared inside one only, and there only with the same cache_salt.

    Raises:
        BadRequest: a token id outside the vocabulary.
    """
    bias = {int(token): value for token, value in (fields.logit_bias or {}).items()}
    _inside_vocabulary("logit_bias", bias, vocab_size)
    stop_ids = tuple(dict.fromkeys(fields.stop_token_ids or ()))
    _inside_vocabulary("stop_token_ids", stop_ids, vocab_size)
    most = default_most_tokens if fields.most_tokens is None else fields.most_tokens
    if most is not None and (fields.min_tokens or 0) > most:
        raise BadRequest(f"min_tokens: above the default max_tokens of {most}", param="min_tokens")
    return Plan(
        sampling=engine_pb2.SamplingParams(
            temperature=_or(fields.temperature, 1.0),
            top_p=max(_or(fields.top_p, 1.0), _SMALLEST),
            top_k=max(fields.top_k or 0, 0),
            min_p=_or(fields.min_p, 0.0),
            frequency_penalty=_or(fields.frequency_penalty, 0.0),
            presence_penalty=_or(fields.presence_penalty, 0.0),
            repetition_penalty=_or(fields.repetition_penalty, 1.0),
            logit_bias=bias,
            logprobs=logprobs.answer,
            top_logprobs=logprobs.top,
            prompt_logprobs=logprobs.prompt,
        ),
        logprobs=logprobs,
        n=fields.n or 1,
        seed=None if fields.seed is None else fields.seed & _MASK64,
        most_tokens=most,
        min_tokens=fields.min_tokens or 0,
        stop_texts=fields.stop_texts,
        keep_stop_text=bool(fields.include_stop_str_in_output),
        stop_token_ids=stop_ids,
        ignore_eos=bool(fields.ignore_eos),
        priority=fields.priority or 0,
        cache_salt=tenant + (fields.cache_salt or "").encode(),
    )


def choice_seed(seed: int, index: int) -> int:
    """The 64-bit seed of choice `index`: the same for the same pair, unrelated to its neighbours'."""
    words = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(words, digest_size=8, person=b"hotset seed").digest(), "little")


def answer_tokens(prompt_tokens: int, most: int | None, limit: int) -> int:
    """Tokens an answer may have: as asked, or whatever fits.

    Raises:
        BadRequest: context_length_exceeded; an answer needs room for one token at least.
    """
    wanted = 1 if most is None else most
    if prompt_tokens + wanted > limit:
        raise BadRequest(
            f"this model's longest prompt and answer is {limit} tokens, but {prompt_tokens + wanted} are "
            f"needed: {prompt_tokens} in the prompt and {wanted} for the answer; shorten the prompt or lower "
            "max_tokens",
            code="context_length_exceeded",
        )
    return limit - prompt_tokens if most is None else most


def _inside_vocabulary(field: str, ids: dict[int, float] | tuple[int, ...], vocab_size: int) -> None:
    outside = [token for token in ids if token >= vocab_size]
    if outside:
        raise BadRequest(
            f"{field}: token {outside[0]} does not exist; the vocabulary has ids 0 to {vocab_size - 1}",
            param=field,
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value

"""What an engine must know of a request before it computes with it.

Knows numbers and the vocabulary's size. The front explains bad input to people; this keeps one request from
ending an engine that serves others.
"""

from __future__ import annotations

import math

import numpy as np
from hotset.v1 import engine_pb2 as pb

from services.contract.errors import InvalidRequest
from services.decoder.kernels.sample_limits import MOST_BARRED, MOST_BIASED

_MOST_TOP_LOGPROBS = 20
MOST_STOPS = MOST_BARRED - 64  # the model's own end tokens join them


def check_request(request: pb.SubmitRequest, vocab: int) -> None:
    """Refuse what would be computed wrongly or not at all.

    Args:
        request: as it came.
        vocab: ids are below this.

    Raises:
        InvalidRequest: no choice or one twice, ids outside the vocabulary, numbers outside their range.
    """
    indices = [choice.index for choice in request.choices]
    if not indices or len(set(indices)) != len(indices):
        raise InvalidRequest(f"a request needs choices with indices of their own; got {indices}")
    wish = request.sampling
    for name, greatest in (
        # Of a message's numbers, 131,072 take Python 8 ms and numpy 0.07, while no step can be launched.
        ("prompt_tokens", int(np.asarray(request.prompt_tokens, np.uint32).max(initial=0))),
        ("stop_token_ids", max(request.stop_token_ids, default=0)),
        ("logit_bias", max(wish.logit_bias, default=0)),
        *(("generated_tokens", max(choice.generated_tokens, default=0)) for choice in request.choices),
    ):
        if greatest >= vocab:
            raise InvalidRequest(f"{name} has token id {greatest}, outside the vocabulary of {vocab}")
    for name, value, least, most in (
        ("temperature", wish.temperature, 0.0, math.inf),
        ("top_p", wish.top_p, 0.0, 1.0),
        ("min_p", wish.min_p, 0.0, 1.0),
        ("repetition_penalty", wish.repetition_penalty, 0.0, math.inf),
        ("frequency_penalty", wish.frequency_penalty, -math.inf, math.inf),
        ("presence_penalty", wish.presence_penalty, -math.inf, math.inf),
        *((f"logit_bias of {token}", bias, -math.inf, math.inf) for token, bias in wish.logit_bias.items()),
    ):
        if not (math.isfinite(value) and least <= value <= most):
            raise InvalidRequest(f"{name} is {value}; it must be a number from {least} to {most}")
    for name, count, most_tokens in (
        ("logit_bias", len(wish.logit_bias), MOST_BIASED),
        ("stop_token_ids", len(request.stop_token_ids), MOST_STOPS),
    ):
        if count > most_tokens:
            raise InvalidRequest(f"{name} names {count} tokens; at most {most_tokens} are possible")
    if wish.top_logprobs > min(_MOST_TOP_LOGPROBS, vocab):
        raise InvalidRequest(f"top_logprobs is {wish.top_logprobs}; at most {_MOST_TOP_LOGPROBS} are told")

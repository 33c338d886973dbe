"""A request as the engine takes it from its message: what it keeps, and what it refuses."""

from __future__ import annotations

import gc

import pytest
from hotset.v1 import engine_pb2 as pb

from services.contract.errors import InvalidRequest
from services.decoder.engine.request_check import check_request
from services.decoder.engine.servicer import sequences_of

VOCAB = 100


def request_of(prompt: list[int], choices: int = 1) -> pb.SubmitRequest:
    return pb.SubmitRequest(prompt_tokens=prompt, choices=[pb.Choice(index=i) for i in range(choices)])


@pytest.mark.parametrize("prompt", [[], [7], [3, 1, 2**31, 2**32 - 1]])
def test_the_prompt_is_kept_as_it_came(prompt: list[int]) -> None:
    one, two = sequences_of(request_of(prompt, choices=2), ())
    assert list(one.prompt) == prompt
    assert one.prompt is two.prompt, "every choice has a prompt of its own"


def test_the_collector_does_not_go_through_a_prompt() -> None:
    """64 prompts of 131,072 tokens, as lists, took it 40 to 70 ms, in which no step is launched."""
    (one,) = sequences_of(request_of([5] * 1000), ())
    assert len(gc.get_referents(one.prompt)) < 2  # its type


@pytest.mark.parametrize("at", [0, 500, 999])
def test_an_id_outside_the_vocabulary_is_refused(at: int) -> None:
    prompt = [VOCAB - 1] * 1000
    check_request(request_of(prompt), VOCAB)
    prompt[at] = VOCAB
    with pytest.raises(InvalidRequest, match="prompt_tokens has token id 100, outside"):
        check_request(request_of(prompt), VOCAB)


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias", "generated_tokens"])
def test_so_is_one_elsewhere(field: str) -> None:
    request = request_of([1])
    if field == "stop_token_ids":
        request.stop_token_ids.append(VOCAB)
    elif field == "logit_bias":
        request.sampling.logit_bias[VOCAB] = 1.0
    else:
        request.choices[0].generated_tokens.append(VOCAB)
    with pytest.raises(InvalidRequest, match=f"^{field} has token id 100"):
        check_request(request, VOCAB)

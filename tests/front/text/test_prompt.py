"""The ways a client may write a completion prompt."""

from __future__ import annotations

from typing import Any

import pytest

from services.contract.errors import InvalidRequest
from services.decoder.front.text.prompt import completion_prompts
from services.decoder.front.text.tokenizer import TextTokenizer


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("12", [[33, 34]]),
        ([33, 34], [[33, 34]]),
        (["1", "2"], [[33], [34]]),
        ([[33], [34, 0]], [[33], [34, 0]]),
        (["1", [34]], [[33], [34]]),
    ],
)
def test_spellings(smollm: TextTokenizer, prompt: Any, ids: list[list[int]]) -> None:
    assert completion_prompts(smollm, prompt) == ids


def test_begin_token_is_added_to_text_not_to_ids(llama2: TextTokenizer) -> None:
    text, ids = completion_prompts(llama2, "a"), completion_prompts(llama2, [300])
    assert text[0][0] == 1
    assert ids == [[300]]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("", "prompt must not be empty"),
        ([], "prompt must not be empty"),
        (["a", ""], r"prompt\[1\] must not be empty"),
        ([[]], r"prompt\[0\] must not be empty"),
        ([1, "a"], r"prompt\[0\] must be a text or a list of token ids"),
        ([True], r"prompt\[0\] must be"),
        ([[1.5]], r"prompt\[0\] must be"),
        ([49152], "token id 49152 is not in the vocabulary"),
        ([[0], [-1]], "token id -1 is not"),
        ("\ud800", "surrogate"),
    ],
)
def test_refused(smollm: TextTokenizer, prompt: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        completion_prompts(smollm, prompt)

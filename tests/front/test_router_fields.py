"""What routers ask and add passes where it asks for nothing, and is refused where it asks for something."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from services.decoder.front.schema.router_fields import CHAT_FIELDS, COMPLETION_FIELDS
from tests.front.live import MODEL, LiveFront, error_of

# As vllm-router 0.1.17 and sglang-router 0.3.2 wrote them into requests that had none of them.
CHAT: dict[str, Any] = {
    "logprobs": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    "include_reasoning": True,
}
COMPLETION: dict[str, Any] = {
    "stream": False,
    "echo": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}


def test_what_routers_add_passes(front: LiveFront) -> None:
    assert front.chat(max_tokens=2, **CHAT).status_code == 200
    assert front.complete(max_tokens=2, **COMPLETION).status_code == 200
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hi"}],
        "continue_final_message": False,
    }
    assert front.post("/tokenize", asked).json()["count"] > 0


@pytest.mark.parametrize("field", CHAT_FIELDS)
def test_a_wish_behind_it_does_not(front: LiveFront, field: str) -> None:
    wish = "please" if len(CHAT_FIELDS[field].harmless) > 1 else not CHAT_FIELDS[field].harmless[0]
    answers = [front.chat(**{field: wish})]
    answers += [front.complete(**{field: wish})] if field in COMPLETION_FIELDS else []
    for answer in answers:
        assert answer.status_code == 400
        error = error_of(answer)
        assert (error["code"], error["param"]) == ("unsupported_parameter", field)


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info", "/server_info", "/get_server_info"])
def test_what_routers_ask_is_answered(front: LiveFront, path: str) -> None:
    answer = httpx.get(f"{front.url}{path}", timeout=60)
    assert answer.status_code == 200
    told = answer.json()
    assert (told["model_path"], told["served_model_name"], told["is_generation"]) == (MODEL, MODEL, True)
    assert (told["max_context_length"], told["max_running_requests"]) == (4096, 8)

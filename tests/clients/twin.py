"""What is asked of the server through every client, and the answers that plain HTTP gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "Tell me a story about a fox."
PROMPT = "Once upon a time"
MAX_TOKENS = 24
STOP = " tale"  # the answer has it


def asked(url: str) -> dict[str, Any]:
    """For the programs: the server and what to ask."""
    return {
        "url": url,
        "model": MODEL,
        "question": QUESTION,
        "prompt": PROMPT,
        "max_tokens": MAX_TOKENS,
        "stop": STOP,
    }


@dataclass(frozen=True)
class Twin:
    """Answers at temperature 0.

    Attributes:
        usage: prompt tokens, tokens sampled, both.
        logprobs: of the chat's tokens, with their text.
    """

    chat: str
    usage: list[int]
    logprobs: list[tuple[str, float]]
    completion: str


def post(url: str, path: str, **body: Any) -> Any:
    """The answer's first choice and its usage, from a 200."""
    wanted = {"model": MODEL, "temperature": 0, "max_tokens": MAX_TOKENS} | body
    response = httpx.post(f"{url}{path}", json=wanted, timeout=120)
    assert response.status_code == 200, response.text
    told = response.json()
    return told["choices"][0], told["usage"]


def chat(url: str, *turns: str, **body: Any) -> Any:
    """The answer to a conversation whose turns are the user's and the model's by turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": turn} for place, turn in enumerate(turns)]
    return post(url, "/v1/chat/completions", messages=messages, **body)


def make_twin(url: str) -> Twin:
    """Ask the server, over plain HTTP, what the clients will ask it."""
    choice, usage = chat(url, QUESTION, logprobs=True)
    answer = choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    assert STOP in answer
    completion, _ = post(url, "/v1/completions", prompt=PROMPT)
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    told = [(one["token"], one["logprob"]) for one in choice["logprobs"]["content"]]
    return Twin(answer, [usage[name] for name in counts], told, completion["text"])

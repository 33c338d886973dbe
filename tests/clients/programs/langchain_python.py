"""What LangChain makes of a server, as JSON. Runs in LangChain's environment."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from langchain_openai import ChatOpenAI, OpenAI


def look(what: str) -> str:
    """Look something up."""
    return what


def main() -> None:
    asked = json.loads(sys.argv[1])
    server: dict[str, Any] = {
        "base_url": f"{asked['url']}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_tokens": asked["max_tokens"],
        "max_retries": 0,
        "timeout": 120,
    }
    chat = ChatOpenAI(model=asked["model"], **server)
    seen: dict[str, Any] = {}
    whole = chat.invoke(asked["question"])
    seen["chat"] = whole.content
    seen["finish"] = whole.response_metadata["finish_reason"]
    counts = ("input_tokens", "output_tokens", "total_tokens")
    seen["usage"] = [whole.usage_metadata[name] for name in counts]

    pieces = list(chat.stream(asked["question"], stream_usage=True))
    seen["pieces"] = [piece.content for piece in pieces]
    [usage] = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    seen["streamed_usage"] = [usage[name] for name in counts]
    seen["at_once"] = [one.content for one in chat.batch([asked["question"]] * 3)]

    stopped = chat.invoke(asked["question"], stop=[asked["stop"]])
    seen["stopped"] = [stopped.content, stopped.response_metadata["finish_reason"]]
    telling = chat.bind(logprobs=True, top_logprobs=2).invoke(asked["question"])
    told = telling.response_metadata["logprobs"]["content"]
    seen["logprobs"] = [[one["token"], one["logprob"]] for one in told]
    seen["likeliest"] = [one["top_logprobs"][0]["token"] for one in told]

    text = OpenAI(model=asked["model"], **server)
    seen["completion"] = text.invoke(asked["prompt"])
    seen["completion_pieces"] = list(text.stream(asked["prompt"]))

    try:
        ChatOpenAI(model="another", **server).invoke(asked["question"])
    except openai.NotFoundError as error:
        seen["wrong_model"] = [type(error).__name__, error.status_code, str(error)]
    try:
        chat.bind_tools([look]).invoke(asked["question"])
    except openai.BadRequestError as error:
        seen["tools"] = [type(error).__name__, error.status_code, str(error)]
    print(json.dumps(seen))


if __name__ == "__main__":
    main()

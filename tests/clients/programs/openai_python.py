"""What OpenAI's package for Python makes of a server, as JSON. Runs in that package's environment."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai


def main() -> None:
    asked = json.loads(sys.argv[1])
    client = openai.OpenAI(base_url=f"{asked['url']}/v1", api_key="none", max_retries=0, timeout=120)
    chat: dict[str, Any] = {
        "model": asked["model"],
        "messages": [{"role": "user", "content": asked["question"]}],
        "temperature": 0,
        "max_completion_tokens": asked["max_tokens"],
    }
    text: dict[str, Any] = {
        "model": asked["model"],
        "prompt": asked["prompt"],
        "temperature": 0,
        "max_tokens": asked["max_tokens"],
    }
    seen: dict[str, Any] = {"models": [model.id for model in client.models.list()]}
    seen["retrieved"] = client.models.retrieve(asked["model"]).id

    whole = client.chat.completions.create(**chat)
    seen["chat"] = whole.choices[0].message.content
    seen["finish"] = whole.choices[0].finish_reason
    seen["usage"] = [whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens]

    pieces = list(client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
    seen["pieces"] = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]
    usage = pieces[-1].usage
    seen["streamed_usage"] = [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens]

    stopped = client.chat.completions.create(**chat, stop=asked["stop"])
    seen["stopped"] = [stopped.choices[0].message.content, stopped.choices[0].finish_reason]

    told = client.chat.completions.create(**chat, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    seen["logprobs"] = [[one.token, one.logprob] for one in told]
    seen["likeliest"] = [one.top_logprobs[0].token for one in told]

    seen["completion"] = client.completions.create(**text).choices[0].text
    parts = client.completions.create(**text, stream=True)
    seen["completion_pieces"] = [part.choices[0].text for part in parts]

    try:
        client.chat.completions.create(**chat | {"model": "another"})
    except openai.NotFoundError as error:
        seen["wrong_model"] = [type(error).__name__, error.status_code, str(error)]
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    try:
        client.chat.completions.create(**chat, tools=[tool])
    except openai.BadRequestError as error:
        seen["tools"] = [type(error).__name__, error.status_code, str(error)]
    print(json.dumps(seen))


if __name__ == "__main__":
    main()

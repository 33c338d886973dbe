"""What LiteLLM makes of a server, as JSON. Runs in LiteLLM's environment."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm


def main() -> None:
    asked = json.loads(sys.argv[1])
    server = {"api_base": f"{asked['url']}/v1", "api_key": "none", "num_retries": 0, "timeout": 120}
    chat: dict[str, Any] = server | {
        "model": f"openai/{asked['model']}",
        "messages": [{"role": "user", "content": asked["question"]}],
        "temperature": 0,
        "max_tokens": asked["max_tokens"],
    }
    seen: dict[str, Any] = {
        "models": litellm.get_valid_models(
            check_provider_endpoint=True,
            custom_llm_provider="openai",
            api_base=asked["url"],
            api_key="none",
        )
    }
    whole = litellm.completion(**chat)
    seen["chat"] = whole.choices[0].message.content
    seen["finish"] = whole.choices[0].finish_reason
    seen["usage"] = [whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens]
    # The same under the name of another kind of server that speaks this protocol.
    hosted = litellm.completion(**chat | {"model": f"hosted_vllm/{asked['model']}"})
    seen["hosted"] = hosted.choices[0].message.content

    pieces = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    seen["pieces"] = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]
    [usage] = [piece.usage for piece in pieces if getattr(piece, "usage", None)]
    seen["streamed_usage"] = [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens]

    async def at_once() -> list[Any]:
        return await asyncio.gather(*(litellm.acompletion(**chat) for _ in range(3)))

    seen["at_once"] = [one.choices[0].message.content for one in asyncio.run(at_once())]

    stopped = litellm.completion(**chat, stop=asked["stop"])
    seen["stopped"] = [stopped.choices[0].message.content, stopped.choices[0].finish_reason]
    told = litellm.completion(**chat, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    seen["logprobs"] = [[one.token, one.logprob] for one in told]
    seen["likeliest"] = [one.top_logprobs[0].token for one in told]

    text: dict[str, Any] = server | {"temperature": 0, "max_tokens": asked["max_tokens"]}
    text |= {"model": f"text-completion-openai/{asked['model']}", "prompt": asked["prompt"]}
    seen["completion"] = litellm.text_completion(**text).choices[0].text
    parts = litellm.text_completion(**text, stream=True)
    seen["completion_pieces"] = [part.choices[0].text or "" for part in parts]

    try:
        litellm.completion(**chat | {"model": "openai/another"})
    except litellm.NotFoundError as error:
        seen["wrong_model"] = [type(error).__name__, error.status_code, str(error)]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    try:
        litellm.completion(**chat, tools=[tool])
    except litellm.BadRequestError as error:
        seen["tools"] = [type(error).__name__, error.status_code, str(error)]
    print(json.dumps(seen))


if __name__ == "__main__":
    main()

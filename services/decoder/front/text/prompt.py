"""The prompts of a request as token ids, whichever way the client wrote them.

Knows the two OpenAI spellings, chat messages and completion prompts; lengths are the scheduler's affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.contract.errors import InvalidRequest
from services.decoder.front.text.chat import ChatTemplate
from services.decoder.front.text.tokenizer import TextTokenizer

CompletionPrompt = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]


def chat_prompt(
    tokenizer: TextTokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a chat, up to where the assistant begins.

    Args:
        tokenizer: of the checkpoint.
        template: of the same checkpoint.
        messages: as `ChatTemplate.render` takes them.
        variables: further variables of the template.

    Raises:
        InvalidRequest: as `ChatTemplate.render`; or nothing comes out.
    """
    text = template.render(messages, variables=variables)
    return _not_empty(tokenizer.encode(text, add_special_tokens=False), "messages")


def completion_prompts(tokenizer: TextTokenizer, prompt: CompletionPrompt) -> list[list[int]]:
    """Token ids of each prompt in `prompt`: a text, token ids, or a list of either.

    Raises:
        InvalidRequest: an empty prompt, a mixed list, or ids that the vocabulary does not have.
    """
    if isinstance(prompt, str):
        return [_not_empty(tokenizer.encode(prompt), "prompt")]
    if not prompt:
        raise InvalidRequest("prompt must not be empty; send a text, or token ids")
    if all(type(item) is int for item in prompt):
        return [_ids(tokenizer, prompt, "prompt")]
    return [_one(tokenizer, item, f"prompt[{number}]") for number, item in enumerate(prompt)]


def _one(tokenizer: TextTokenizer, item: object, where: str) -> list[int]:
    if isinstance(item, str):
        return _not_empty(tokenizer.encode(item), where)
    if isinstance(item, Sequence) and all(type(token_id) is int for token_id in item):
        return _ids(tokenizer, item, where)
    raise InvalidRequest(f"{where} must be a text or a list of token ids, like the others")


def _ids(tokenizer: TextTokenizer, token_ids: Sequence[Any], where: str) -> list[int]:
    tokenizer.check_ids(token_ids)
    return _not_empty(list(token_ids), where)


def _not_empty(token_ids: list[int], where: str) -> list[int]:
    if not token_ids:
        raise InvalidRequest(f"{where} must not be empty; at least one token is needed to go on from")
    return token_ids

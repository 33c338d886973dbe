"""The body of /v1/chat/completions. Messages are text; what a template makes of them is text/chat.py's."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from services.decoder.front.schema.base import RequestBody, Text, Unserved
from services.decoder.front.schema.problems import complaint
from services.decoder.front.schema.router_fields import CHAT_FIELDS
from services.decoder.front.schema.sampling_fields import SamplingFields

MAX_MESSAGES = 4096
MAX_TOP_LOGPROBS = 20

_NO_TOOLS = "tools cannot be called; leave it out and describe the format you want in a message"


class TextPart(RequestBody):
    """A piece of a message's text."""

    type: Literal["text"]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: object) -> object:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise complaint(
                "type", f"content of type '{kind[:40]}' is not supported; send text", unsupported=True
            )
        return data


class Message(RequestBody):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="developer means the same as system"
    )
    content: Text | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    name: Text | None = Field(None, description="handed to the model's template, which may not use it")

    unserved: ClassVar = {
        "tool_calls": Unserved(([],), _NO_TOOLS),
        "tool_call_id": Unserved(instead=_NO_TOOLS),
        "function_call": Unserved(instead=_NO_TOOLS),
        "audio": Unserved(instead="send text"),
        "refusal": Unserved(),
    }

    @model_validator(mode="before")
    @classmethod
    def _no_tool_turns(cls, data: object) -> object:
        role = data.get("role") if isinstance(data, dict) else None
        if role in ("tool", "function"):
            raise complaint("role", f"'{role}' is not supported; {_NO_TOOLS}", unsupported=True)
        return data

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates know it; few of them know the role `developer`."""
        told = self.model_dump(exclude_none=True)
        return told | {"role": "system" if self.role == "developer" else self.role}


class ChatRequest(SamplingFields):
    """What /v1/chat/completions takes."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    logprobs: bool | None = Field(None, description="report the log probability of each token")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="and of this many most likely ones; needs logprobs"
    )

    unserved: ClassVar = {
        "tools": Unserved(([],), _NO_TOOLS),
        "tool_choice": Unserved(("none", "auto"), _NO_TOOLS),
        "parallel_tool_calls": Unserved((True, False)),
        "functions": Unserved(([],), _NO_TOOLS),
        "function_call": Unserved(("none", "auto"), _NO_TOOLS),
        "response_format": Unserved(({"type": "text"},), "answers are plain text"),
        "modalities": Unserved((["text"],), "answers are text"),
        "audio": Unserved(instead="answers are text"),
        "prediction": Unserved(),
        "reasoning_effort": Unserved(("none",)),
        "verbosity": Unserved(),
        "web_search_options": Unserved(),
        "moderation": Unserved(),
        "store": Unserved((False,), "nothing is stored"),
        "service_tier": Unserved(("auto", "default")),
        **CHAT_FIELDS,
    }
    # Names of end users and hints to OpenAI's own caches: nothing here depends on them.
    safety_identifier: Text | None = Field(None, description="ignored")
    prompt_cache_key: Text | None = Field(None, description="ignored; see cache_salt")
    prompt_cache_retention: Text | None = Field(None, description="ignored")

    @model_validator(mode="after")
    def _chat_agrees(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise complaint("top_logprobs", "only with logprobs: true")
        if self.most_tokens == 0:
            raise complaint("max_tokens", "must be at least 1")
        return self

"""The bodies of /tokenize and /detokenize: how text and token ids turn into each other here."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import BaseModel, Field, model_validator

from services.decoder.front.schema.base import RequestBody, Text
from services.decoder.front.schema.chat import MAX_MESSAGES, Message
from services.decoder.front.schema.problems import complaint
from services.decoder.front.schema.router_fields import CHAT_FIELDS
from services.decoder.front.schema.sampling_fields import TokenId


class TokenizeRequest(RequestBody):
    """A text, or a conversation that the chat template is applied to first."""

    model: Text | None = Field(None, description="as /v1/models lists it; may be left out")
    prompt: Text | None = None
    messages: (
        Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = None
    add_special_tokens: bool | None = Field(
        None,
        description="let the tokenizer add its own begin token; default true for prompt, false for messages",
    )
    return_token_strs: bool | None = Field(None, description="also give each token as text")

    unserved: ClassVar = {"continue_final_message": CHAT_FIELDS["continue_final_message"]}

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise complaint("prompt", "send either prompt or messages")
        return self


class TokenizeAnswer(BaseModel):
    """Token ids of a text."""

    count: int = Field(description="tokens")
    max_model_len: int | None = Field(
        description="longest prompt + answer, tokens; null until the engine is up"
    )
    tokens: list[int]
    token_strs: list[Text] | None = None


class DetokenizeRequest(RequestBody):
    """Token ids."""

    model: Text | None = Field(None, description="as /v1/models lists it; may be left out")
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class DetokenizeAnswer(BaseModel):
    """The text they stand for, special tokens included."""

    prompt: str

"""What generation routes answer with, whole and in chunks, field for field as OpenAI has it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, model_serializer

Finish = Literal["stop", "length"]


class PromptTokensDetails(BaseModel):
    """Where the prompt's tokens came from."""

    cached_tokens: int = Field(0, description="tokens served by the prefix cache")


class Usage(BaseModel):
    """Tokens counted."""

    prompt_tokens: int
    completion_tokens: int = Field(description="tokens sampled, end tokens included")
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopTokenLogprob(BaseModel):
    """A token that could have been chosen."""

    token: str = Field(description="its text; `bytes:` and escapes if it is not whole characters")
    logprob: float = Field(description="natural log; -9999 stands for minus infinity")
    bytes: list[int]


class TokenLogprob(TopTokenLogprob):
    """The token that was."""

    top_logprobs: list[TopTokenLogprob]


class ChatLogprobs(BaseModel):
    """Log probabilities of an answer's tokens."""

    content: list[TokenLogprob] | None
    refusal: None = None


class ChatMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One whole answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(BaseModel):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(description="Unix time, seconds")
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    """What a chunk adds; fields that are not set are left out."""

    role: Literal["assistant"] | None = None
    content: str | None = None

    @model_serializer(mode="wrap")
    def _only_what_is_set(self, handler: SerializerFunctionWrapHandler) -> dict[str, str]:
        return {name: value for name, value in handler(self).items() if value is not None}


class ChatChunkChoice(BaseModel):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None


class ChatChunk(BaseModel):
    """One server-sent event of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionLogprobs(BaseModel):
    """Log probabilities as parallel lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="null for the first token of an echoed prompt")
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="characters before the token")


class CompletionChoice(BaseModel):
    """One answer, or its part of a chunk."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None


class Completion(BaseModel):
    """Answer of /v1/completions, and each of its chunks."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None

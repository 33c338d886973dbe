"""How tokens are chosen and where an answer ends: the fields that chat and completions share."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from services.decoder.front.schema.base import RequestBody, Text
from services.decoder.front.schema.problems import complaint

UsageTold = Literal["never", "at the end", "always"]
"""When a stream tells token counts."""
MAX_CHOICES = 128
"""Most choices of one HTTP request: n times prompts."""
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_BIASED_TOKENS = 4096

TokenId = Annotated[int, Field(ge=0, lt=2**32)]
StopText = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class StreamOptions(RequestBody):
    """What a stream carries beside the answer."""

    include_usage: bool | None = Field(None, description="send a last chunk with token counts")
    continuous_usage_stats: bool | None = Field(
        None, description="token counts so far in every chunk; needs include_usage"
    )
    include_obfuscation: bool | None = Field(None, description="ignored; no padding is ever sent")

    @model_validator(mode="after")
    def _counts_are_wanted(self) -> Self:
        if self.continuous_usage_stats and not self.include_usage:
            raise complaint("continuous_usage_stats", "only with include_usage: true")
        return self


class SamplingFields(RequestBody):
    """Sampling, length and ends. Null means the default everywhere."""

    model: Text = Field(min_length=1, max_length=1024, description="as /v1/models lists it")
    temperature: float | None = Field(None, ge=0, le=2, description="0 = greedy; default 1")
    top_p: float | None = Field(None, gt=0, le=1, description="default 1 = off")
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="most likely tokens kept; -1 or 0 = off")
    min_p: float | None = Field(None, ge=0, le=1, description="least share of the best probability; 0 = off")
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**64, description="same seed, same request, same answer; default: random"
    )
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="default 1 = off")
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")],
                Annotated[float, Field(ge=-100, le=100)],
            ],
            Field(max_length=MAX_BIASED_TOKENS),
        ]
        | None
    ) = Field(None, description="token id, as text -> added to its logit")
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = Field(
        None, description="texts that end the answer; they are not part of it"
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = Field(
        None, description="token ids that end the answer, beside the model's own"
    )
    include_stop_str_in_output: bool | None = Field(None, description="keep the stop text; default false")
    max_tokens: int | None = Field(None, ge=0, lt=2**31, description="most tokens of the answer")
    max_completion_tokens: int | None = Field(None, ge=0, lt=2**31, description="the same, its newer name")
    min_tokens: int | None = Field(None, ge=0, lt=2**31, description="no end before this many tokens")
    ignore_eos: bool | None = Field(None, description="do not end at the model's own end tokens")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="answers to each prompt; default 1")
    stream: bool | None = Field(None, description="send server-sent events as tokens come")
    stream_options: StreamOptions | None = None
    cache_salt: Text | None = Field(
        None, min_length=1, max_length=256, description="prompts share cached prefixes only within a salt"
    )
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="lower runs earlier; default 0")
    user: Text | None = Field(None, description="ignored")
    metadata: dict[Text, Text] | None = Field(None, description="ignored")

    @model_validator(mode="after")
    def _agree(self) -> Self:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise complaint("max_completion_tokens", "differs from max_tokens; send one of them")
        most = self.most_tokens
        if most is not None and (self.min_tokens or 0) > most:
            raise complaint("min_tokens", f"{self.min_tokens} is above max_tokens of {most}")
        if self.stream_options is not None and not self.stream:
            raise complaint("stream_options", "only with stream: true")
        return self

    @property
    def usage_told(self) -> UsageTold:
        """When a stream tells token counts."""
        options = self.stream_options
        if options is None or not options.include_usage:
            return "never"
        return "always" if options.continuous_usage_stats else "at the end"

    @property
    def most_tokens(self) -> int | None:
        """Tokens an answer may have, by whichever name it was said."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop texts, however they were sent."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

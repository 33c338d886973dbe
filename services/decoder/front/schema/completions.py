"""The body of /v1/completions: one or more prompts, as text or as token ids."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from services.decoder.front.schema.base import Text, Unserved
from services.decoder.front.schema.problems import complaint
from services.decoder.front.schema.router_fields import COMPLETION_FIELDS
from services.decoder.front.schema.sampling_fields import MAX_CHOICES, SamplingFields, TokenId

MAX_TOP_LOGPROBS = 20

_Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
_Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
_ManyTokens = Annotated[list[_Tokens], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


class CompletionRequest(SamplingFields):
    """What /v1/completions takes."""

    prompt: Text | _Texts | _Tokens | _ManyTokens = Field(
        description="text, several texts, token ids, or several lists of them; answers come in this order"
    )
    echo: bool | None = Field(None, description="begin each answer with its prompt")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="report the chosen token and this many most likely ones"
    )

    unserved: ClassVar = {
        "best_of": Unserved((1,), "ask for n answers and choose yourself"),
        "suffix": Unserved(("",), "text is only ever continued"),
        **COMPLETION_FIELDS,
    }

    @model_validator(mode="after")
    def _completion_agrees(self) -> Self:
        if self.most_tokens == 0 and not self.echo:
            raise complaint("max_tokens", "0 is only of use with echo: true")
        if self.prompt_count * (self.n or 1) > MAX_CHOICES:
            raise complaint("n", f"n times prompts is above {MAX_CHOICES}")
        return self

    @property
    def prompt_count(self) -> int:
        """Prompts sent."""
        alone = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return 1 if alone else len(self.prompt)

"""Messages to prompt text, by the checkpoint's chat template.

Knows Jinja and what chat templates expect to find in it; no tokens. Templates run in a sandbox, since
they come with checkpoints from anywhere, and messages are only ever data to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jinja2 import Template, TemplateError, TemplateSyntaxError

from services.contract.errors import InvalidRequest, SetupError
from services.decoder.front.text.chat_environment import chat_environment
from services.decoder.front.text.checkpoint import chat_template, special_tokens

_PROBE = "f8b1 probe"
_TEMPLATE_FAULTS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template can raise on messages it was not written for."""


class ChatTemplate:
    """A checkpoint's chat template, or the lack of one. Immutable; any thread may use it."""

    def __init__(self, source: str | None, named: Mapping[str, str]) -> None:
        """Compile `source`.

        Args:
            source: Jinja text; None = the checkpoint has no template, and `render` refuses.
            named: role -> text of the special tokens, which templates use as variables.

        Raises:
            SetupError: not a Jinja template.
        """
        self._named = dict(named)
        self._template = None if source is None else _compile(source)
        self._takes_text = self._shows(_PROBE)
        self._takes_parts = self._shows([{"type": "text", "text": _PROBE}])

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        """The template of the checkpoint in `directory`.

        Raises:
            SetupError: one of its files is broken.
        """
        return cls(chat_template(directory), special_tokens(directory))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt that the messages amount to. It has its special tokens: encode it without adding any.

        Args:
            messages: each with `role` and `content`: text, or a list of `{"type": "text", "text": ...}`;
                other keys reach the template as they are.
            add_generation_prompt: end with what opens the assistant's answer.
            variables: further variables of the template, for example `{"enable_thinking": False}`.

        Raises:
            InvalidRequest: no template, a message without text, parts other than text, or messages that
                the template refuses.
        """
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template, so it cannot chat; send a prompt to /v1/completions"
            )
        if not messages:
            raise InvalidRequest("messages must hold at least one message")
        prepared = [
            {**message, "content": self._content(message.get("content"), f"messages[{number}].content")}
            for number, message in enumerate(messages)
        ]
        given = {**self._named, **(variables or {})}
        try:
            return _render(self._template, prepared, add_generation_prompt, given)
        except _TEMPLATE_FAULTS as error:
            fault = error.message if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise InvalidRequest(f"the model's chat template refuses these messages: {fault}") from error

    def _shows(self, content: object) -> bool:
        """Whether the template puts the text of such content into the prompt, and not its Python spelling."""
        if self._template is None:
            return False
        try:
            text = _render(self._template, [{"role": "user", "content": content}], True, self._named)
        except _TEMPLATE_FAULTS:
            return False
        return _PROBE in text and "'text'" not in text and '"text"' not in text

    def _content(self, content: object, where: str) -> object:
        """The content in a form that the template takes."""
        if isinstance(content, str):
            return (
                content if self._takes_text or not self._takes_parts else [{"type": "text", "text": content}]
            )
        if not isinstance(content, Sequence) or not content:
            raise InvalidRequest(f"{where} must be text, or a list of parts of type text")
        texts = [_part_text(part, f"{where}[{number}]") for number, part in enumerate(content)]
        if self._takes_parts:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)  # apart, as the parts were; a template that takes text has no say in it


def _compile(source: str) -> Template:
    try:
        return chat_environment().from_string(source)
    except TemplateSyntaxError as error:
        raise SetupError(
            f"the chat template is not valid Jinja, line {error.lineno}: {error.message}; correct "
            "chat_template.jinja (or chat_template in tokenizer_config.json) of the checkpoint"
        ) from error


def _render(
    template: Template,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    own = {"messages": messages, "tools": None, "documents": None}
    return template.render({**variables, **own, "add_generation_prompt": add_generation_prompt})


def _part_text(part: object, where: str) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise InvalidRequest(f"{where} must be an object with a type")
    if part["type"] != "text":
        raise InvalidRequest(
            f"{where} is of type {part['type'][:40]!r}; this server reads text only: send parts of type text"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text must be text")
    return text

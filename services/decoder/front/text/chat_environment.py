"""The Jinja environment that chat templates are written for.

Knows what templates of published checkpoints use; no template and no message.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateRuntimeError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks the assistant's words for training; they stay."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own declaration of it is not a ClassVar

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def chat_environment() -> ImmutableSandboxedEnvironment:
    """A new environment: sandboxed, loop controls, JSON without HTML escapes, and three helpers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes < > & and quotes for HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRuntimeError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)

"""What the small JSON files of a checkpoint say about text: special tokens, end tokens, chat template.

Knows no tokenizer; each function reads the directory afresh.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.contract.errors import SetupError

SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file.

    Raises:
        SetupError: the file cannot be read, or holds something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read: {error}; fetch the checkpoint again") from error
    if not isinstance(value, dict):
        raise SetupError(f"{path} must hold a JSON object; fetch the checkpoint again")
    return value


def special_tokens(directory: Path) -> dict[str, str]:
    """Role -> text of the named special tokens, for example `{"bos_token": "<s>"}`; unnamed roles are absent.

    tokenizer_config.json goes before special_tokens_map.json, as in transformers.

    Raises:
        SetupError: one of the files is broken.
    """
    named = read_json(directory / "special_tokens_map.json") | read_json(directory / "tokenizer_config.json")
    texts = {role: _text(named.get(role)) for role in SPECIAL_ROLES}
    return {role: text for role, text in texts.items() if text is not None}


def eos_ids(directory: Path) -> frozenset[int]:
    """Ids that end an answer, by generation_config.json or else config.json; empty if neither says.

    Raises:
        SetupError: a file is broken, or the ids are not whole numbers.
    """
    for name in ("generation_config.json", "config.json"):
        value = read_json(directory / name).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(item) is int for item in ids):
            raise SetupError(f"{directory / name}: eos_token_id must be a number or a list of numbers")
        return frozenset(ids)
    return frozenset()


def chat_template(directory: Path) -> str | None:
    """Source of the chat template; None if the checkpoint has none.

    chat_template.jinja goes before tokenizer_config.json. Of several named templates, the one called
    `default`, or the only one.

    Raises:
        SetupError: a file is broken, or none of several templates is called `default`.
    """
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise SetupError(f"{path} cannot be read: {error}; fetch the checkpoint again") from error
    config = directory / "tokenizer_config.json"
    value = read_json(config).get("chat_template")
    if value is None or isinstance(value, str):
        return value
    try:
        named = {str(item["name"]): str(item["template"]) for item in value}
    except (KeyError, TypeError) as error:
        raise SetupError(f"{config}: chat_template must be text or a list of name and template") from error
    if len(named) == 1:
        return next(iter(named.values()))
    if named and "default" not in named:
        raise SetupError(
            f"{config} has chat templates {sorted(named)} and none called default; "
            f"write the one to use to {path}"
        )
    return named.get("default")


def _text(value: object) -> str | None:
    """A special token is written as its text, or as an object that holds it."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None

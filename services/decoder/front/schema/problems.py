"""Pydantic's list of complaints, boiled down to the one error that OpenAI's shape has room for.

Knows no field; `param` is where the complaint points, written `messages[0].content`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, LiteralString

from pydantic_core import PydanticCustomError

from services.decoder.front.errors import BadRequest, RequestCode

# Union branches stand in pydantic's locations beside real fields: `str`, `list[int]`, `constrained-int`.
_BRANCH = re.compile(r"[\[\]()-]|^(str|int|float|bool|list|dict|none)$")
_UNKNOWN = "extra_forbidden"
_UNSUPPORTED: LiteralString = "unsupported"


def complaint(field: str, reason: str, *, unsupported: bool = False) -> PydanticCustomError:
    """What a validator of a whole object raises about one of its fields.

    Args:
        field: its name; it becomes `param`.
        reason: the message for people.
        unsupported: the field is OpenAI's, but not served here.
    """
    kind: LiteralString = _UNSUPPORTED if unsupported else "value_error"
    return PydanticCustomError(kind, "{reason}", {"reason": reason, "field": field})


def first_problem(errors: Sequence[Mapping[str, Any]]) -> BadRequest:
    """The first field's complaint: of a union's branches, each of which has its own, those that got furthest.

    Args:
        errors: as `RequestValidationError.errors()` gives them, at least one.
    """
    field = errors[0]["loc"][:2]
    first = max((error for error in errors if error["loc"][:2] == field), key=_depth)
    unknown = first["type"] == _UNKNOWN
    param = _param(first["loc"], last_is_field=unknown)
    if first["type"] == "json_invalid":
        return BadRequest(
            f"the body is not valid JSON: {(first.get('ctx') or {}).get('error')}", code="invalid_json"
        )
    if unknown:
        return BadRequest(
            f"{param}: this server does not know that field; docs/openai_api.md lists those it does",
            param=param,
            code="unknown_parameter",
        )
    if name := (first.get("ctx") or {}).get("field"):
        param = f"{param}.{name}" if param else str(name)
        return BadRequest(f"{param}: {first['msg']}", param=param, code=_code(first))
    if not param:
        return BadRequest("the body must be a JSON object with the fields of this route", code=_code(first))
    branches = [error for error in errors if _param(error["loc"]) == param]
    # A branch whose type fits says what is wrong; that the others' types do not fit is no news.
    branches = [error for error in branches if _code(error) != "invalid_type"] or branches
    told = list(dict.fromkeys(str(error["msg"]) for error in branches))
    return BadRequest(f"{param}: {'; or '.join(told[:4])}", param=param, code=_code(branches[0]))


def _param(location: Sequence[str | int], *, last_is_field: bool = False) -> str:
    text = ""
    for place, part in enumerate(location[1:], start=2):
        if isinstance(part, int):
            text += f"[{part}]"
        elif (last_is_field and place == len(location)) or not _BRANCH.search(part):
            text += f".{part}" if text else part
    return text[:200]


def _depth(error: Mapping[str, Any]) -> int:
    return len(re.findall(r"[\[.]", _param(error["loc"])))


def _code(error: Mapping[str, Any]) -> RequestCode:
    kind = str(error["type"])
    if kind == "missing":
        return "missing_required_parameter"
    if kind == _UNSUPPORTED:
        return "unsupported_parameter"
    return "invalid_type" if kind.endswith("_type") else "invalid_value"

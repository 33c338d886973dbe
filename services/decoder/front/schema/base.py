"""The ground every request body stands on: strict types, no unknown field, known ones refused by name.

A field that OpenAI defines and this server does not serve is listed with the values that change nothing.
Those are accepted and dropped; any other is refused, so that no answer silently lacks what was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from services.decoder.front.schema.problems import complaint


def _whole_characters(text: str) -> str:
    """Refuse half a surrogate pair, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError(
            "not_unicode", "half a surrogate pair at character {at} is not valid Unicode", {"at": error.start}
        ) from error
    return text


Text = Annotated[str, AfterValidator(_whole_characters)]
"""Text as clients send it; every string field is one."""


@dataclass(frozen=True)
class Unserved:
    """A field of OpenAI's that is not served.

    Attributes:
        harmless: values that ask for nothing; null is always one.
        instead: what the client can do, for the error message.
    """

    harmless: tuple[Any, ...] = ()
    instead: str = "leave it out"


class RequestBody(BaseModel):
    """Strict: no text for a number, no NaN, no field that is not known."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    unserved: ClassVar[Mapping[str, Unserved]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, rule in cls.unserved.items():
            value = data.get(name)
            # 0 == False and 1 == True in Python; a harmless value must also be of the harmless type.
            if value is not None and not any(
                type(value) is type(calm) and value == calm for calm in rule.harmless
            ):
                raise complaint(name, f"not supported by this server; {rule.instead}", unsupported=True)
        return {name: value for name, value in data.items() if name not in cls.unserved}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema with the unserved fields told as what is accepted of them."""
        schema = handler.resolve_ref_schema(handler(core))
        for name, rule in cls.unserved.items():
            schema.setdefault("properties", {})[name] = {
                "enum": [None, *rule.harmless],
                "description": "not served; only values that ask for nothing are accepted",
            }
        return schema

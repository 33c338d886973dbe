"""How every service reads its settings: flags, then environment, then a TOML file, then defaults.

Knows no setting of any service. A service subclasses `ServiceSettings` with its frozen fields; each
field's description is its `--help` line and names its unit.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from services.contract.errors import SetupError

CONFIG_VARIABLE = "HOTSET_CONFIG"


class ServiceSettings(BaseSettings):
    """Frozen settings; `HOTSET_PORT=9000`, `--port 9000` and `port = 9000` in the file mean the same.

    The file is the one that `HOTSET_CONFIG` names; a service reads the table named `table` in it, if any.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        env_prefix="HOTSET_",
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        validate_default=True,
    )

    table: ClassVar[str]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags and arguments first, then the environment, then the file."""
        sources: tuple[PydanticBaseSettingsSource, ...] = (init_settings, env_settings)
        path = os.environ.get(CONFIG_VARIABLE)
        if not path:
            return sources
        return (*sources, InitSettingsSource(settings_cls, _read_table(Path(path), cls.table)))

    @classmethod
    def from_command_line(cls, arguments: Sequence[str], *, program: str) -> Self:
        """The settings that flags, environment and file amount to.

        Args:
            arguments: the flags, without the program's name; `--help` prints the fields and exits.
            program: the name that `--help` shows.

        Raises:
            SetupError: a value that the field refuses, an unknown flag, or a broken file.
        """
        from pydantic_settings import CliSettingsSource

        try:
            flags: CliSettingsSource[Self] = CliSettingsSource(
                cls, cli_parse_args=list(arguments), cli_prog_name=program, cli_exit_on_error=False
            )
            return cls(_cli_settings_source=flags)  # type: ignore[call-arg]  # pydantic-settings' own keyword
        except ValidationError as error:
            lines = [
                f"  {'.'.join(map(str, item['loc'])) or 'settings'}: {item['msg']}" for item in error.errors()
            ]
            raise SetupError(
                "settings refused (flags, HOTSET_* or the file):\n" + "\n".join(lines)
            ) from error
        except SettingsError as error:
            raise SetupError(f"settings refused: {error}; see `python -m {program} --help`") from error


def _read_table(path: Path, name: str) -> dict[str, Any]:
    """The table `name` of the TOML file at `path`, empty if the file has none."""
    try:
        table = tomllib.loads(path.read_text("utf-8")).get(name, {})
    except OSError as error:
        raise SetupError(
            f"{CONFIG_VARIABLE}={path}: {error.strerror}; unset it or name a TOML file"
        ) from error
    except ValueError as error:
        raise SetupError(f"{CONFIG_VARIABLE}={path}: not TOML: {error}") from error
    if not isinstance(table, dict):
        raise SetupError(f"{CONFIG_VARIABLE}={path}: write {name} as a table, [{name}]")
    return table


def exit_with(error: SetupError) -> None:
    """End the process with the error's text on standard error, status 2, and no traceback."""
    print(f"error: {error}", file=sys.stderr)  # noqa: T201  # the one line a person is to read
    raise SystemExit(2)

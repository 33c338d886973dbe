from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field, ValidationError

from services.contract.base_settings import CONFIG_VARIABLE, ServiceSettings, exit_with
from services.contract.byte_size import ByteSize
from services.contract.errors import SetupError


class Settings(ServiceSettings):
    """A service of this test."""

    table: ClassVar[str] = "service"

    port: int = Field(7, ge=1, description="port of the service")
    room_bytes: ByteSize = Field(1024, description="room, bytes")
    keep: bool = Field(False, description="keep things")


def read(*arguments: str) -> Settings:
    return Settings.from_command_line(arguments, program="service")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "hotset.toml"
    monkeypatch.setenv(CONFIG_VARIABLE, str(path))
    return path


def test_defaults() -> None:
    assert (read().port, read().room_bytes, read().keep) == (7, 1024, False)


def test_flags_beat_the_environment_which_beats_the_file(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text('[service]\nport = 1\nroom_bytes = "1MiB"\nkeep = true\n')
    assert (read().port, read().room_bytes, read().keep) == (1, 2**20, True)
    monkeypatch.setenv("HOTSET_PORT", "2")
    monkeypatch.setenv("HOTSET_ROOM_BYTES", "2MiB")
    assert (read().port, read().room_bytes, read().keep) == (2, 2**21, True)
    got = read("--port", "3", "--no-keep")
    assert (got.port, got.room_bytes, got.keep) == (3, 2**21, False)


def test_a_file_for_other_services_only_is_fine(config: Path) -> None:
    config.write_text("[another]\nport = 1\n")
    assert read().port == 7


REFUSED_FILES = {
    "no TOML": ("[service", "not TOML"),
    "not a table": ("service = 3\n", r"write service as a table, \[service\]"),
    "unknown key": ("[service]\nprot = 1\n", "prot: Extra inputs are not permitted"),
    "wrong type": ('[service]\nport = "many"\n', "port: .*integer"),
    "wrong size": ("[service]\nroom_bytes = 1.5\n", "room_bytes: .*is not a size"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED_FILES.values(), ids=REFUSED_FILES)
def test_files_that_are_refused(config: Path, text: str, message: str) -> None:
    config.write_text(text)
    with pytest.raises(SetupError, match=message):
        read()


def test_files_that_cannot_be_read(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SetupError, match="No such file or directory; unset it"):
        read()
    config.mkdir()
    with pytest.raises(SetupError, match="Is a directory; unset it"):
        read()
    config.rmdir()
    config.write_bytes(b"\xff\xfe")
    with pytest.raises(SetupError, match="not TOML"):
        read()


REFUSED_FLAGS = {
    "unknown": (("--prot", "1"), "prot"),
    "no value": (("--port",), "port"),
    "out of range": (("--port", "0"), "port: Input should be greater than or equal to 1"),
    "no number": (("--port", "many"), "port: .*integer"),
    "no size": (("--room-bytes", "much"), "'much' is not a size; write for example 512MiB"),
    "stray word": (("hello",), "hello"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED_FLAGS.values(), ids=REFUSED_FLAGS)
def test_flags_that_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        read(*arguments)


def test_the_environment_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_PORT", "-1")
    with pytest.raises(SetupError, match="port: "):
        read()


def test_help_names_fields_and_units(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        read("--help")
    assert exit_.value.code == 0
    assert "room, bytes" in capsys.readouterr().out


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        read().port = 9


def test_an_error_ends_the_process_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        exit_with(SetupError("no room; get some"))
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "error: no room; get some\n"

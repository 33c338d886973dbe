"""The command's front door: help, versions, what is not there, and how failures end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from services.command.__main__ import COMMANDS, main


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    for name, (what, _) in COMMANDS.items():
        assert f"  {name:<8}{what}" in told
    assert main([]) == 2
    assert capsys.readouterr().out == told


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("hotset 0.")


@pytest.mark.parametrize(
    ("asked", "hint"), [("sevre", "did you mean `hotset serve`?"), ("xyzzy", "see `hotset --help`")]
)
def test_an_unknown_command(asked: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([asked]) == 2
    assert capsys.readouterr().err == f"error: there is no command '{asked}'; {hint}\n"


@pytest.mark.parametrize("name", ["chat", "bench", "plan", "doctor"])
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: hotset {name}")


def test_the_help_needs_no_torch() -> None:
    code = (
        "import sys; from services.command.__main__ import main; main(['--help']);"
        "sys.exit(' '.join({'torch', 'transformers', 'fastapi'} & {*sys.modules}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_store_becomes_kvstore() -> None:
    command = [sys.executable, "-m", "services.command", "store", "--listen", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'nowhere' is neither host:port" in done.stderr
    assert "Traceback" not in done.stderr

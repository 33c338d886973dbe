"""The environment is brought up to date when, and only when, something changed; make says what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy import install as installer
from deploy.install import InstallError, inputs_digest, missing_extras

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What an installation reads of the project, without the rest."""
    root = tmp_path / "copy"
    shutil.copytree(ROOT / "proto", root / "proto", ignore=shutil.ignore_patterns("*_pb2*", "__pycache__"))
    shutil.copytree(ROOT / "deploy", root / "deploy", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "Makefile"):
        shutil.copy(ROOT / name, root / name)
    return root


def _edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def edit(root: Path) -> None:
        text = (root / name).read_text()
        assert old in text
        (root / name).write_text(text.replace(old, new, 1))

    return edit


CHANGES = {
    "a dependency": (_edit("pyproject.toml", '"numpy>=2.0"', '"numpy>=2.1"'), True),
    "an extra": (_edit("pyproject.toml", '"httpx>=', '"httpx2>='), True),
    "the build": (_edit("pyproject.toml", '"hatchling>=', '"hatchling >='), True),
    "a proto": (_edit("proto/hotset/v1/kvstore.proto", "service KvStore", "service  KvStore"), True),
    "the generator": (_edit("proto/build_stubs.py", "protoc failed", "protoc  failed"), True),
    "a linter's setting": (_edit("pyproject.toml", "line-length = 110", "line-length = 100"), False),
    "the Makefile": (_edit("Makefile", "PORT ?= 8000", "PORT ?= 8001"), False),
}


@pytest.mark.parametrize(("edit", "matters"), CHANGES.values(), ids=CHANGES)
def test_what_calls_for_pip(copy: Path, edit: Callable[[Path], None], matters: bool) -> None:
    before = inputs_digest(copy, "3.11.7", "torch==2.13.0")
    edit(copy)
    assert (inputs_digest(copy, "3.11.7", "torch==2.13.0") != before) == matters


def test_python_torch_and_place_matter(copy: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(copy, elsewhere)
    digests = {
        inputs_digest(copy, "3.11.7", "torch==2.13.0"),
        inputs_digest(copy, "3.12.1", "torch==2.13.0"),
        inputs_digest(copy, "3.11.7", "torch==2.12.0"),
        inputs_digest(elsewhere, "3.11.7", "torch==2.13.0"),
    }
    assert len(digests) == 4


def test_extras_add_up(tmp_path: Path) -> None:
    assert missing_extras(tmp_path, "one", ["decoder"]) == {"decoder"}
    stamp = tmp_path / "hotset-installed.json"
    stamp.write_text(json.dumps({"digest": "one", "extras": ["decoder", "dev"]}))
    assert missing_extras(tmp_path, "one", ["decoder"]) == set()
    assert missing_extras(tmp_path, "one", ["decoder", "test"]) == {"test"}
    assert missing_extras(tmp_path, "two", ["test"]) == {"decoder", "dev", "test"}
    stamp.write_text("{")
    assert missing_extras(tmp_path, "one", ["decoder"]) == {"decoder"}


class FakePip:
    """Stands for the environment's Python: records the pip calls, and makes the stubs as the hook does."""

    def __init__(self, root: Path, status: int = 0) -> None:
        self.root = root
        self.status = status
        self.calls: list[list[str]] = []

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        self.calls.append(command)
        for proto in self.root.glob("proto/hotset/v1/*.proto"):
            proto.with_name(f"{proto.stem}_pb2.py").touch()
        return subprocess.CompletedProcess(command, self.status)


@pytest.fixture
def pip(copy: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    (copy / ".venv").mkdir()
    fake = FakePip(copy)
    monkeypatch.setattr(installer, "environment_version", lambda _: "3.11.7")
    monkeypatch.setattr("deploy.install.subprocess.run", fake)
    return fake


def _install(copy: Path, *extras: str, torch: str = "torch==2.13.0") -> None:
    installer.install(copy, copy / ".venv", torch, extras, remake=False)


def test_pip_runs_once(copy: Path, pip: FakePip) -> None:
    _install(copy, "decoder")
    _install(copy, "decoder")
    [call] = pip.calls
    assert call[1:4] == ["-m", "pip", "install"]
    assert call[-3:] == ["--editable", ".[decoder]", "torch==2.13.0"]
    _install(copy, "decoder", torch="torch --index-url 'a b'")
    assert pip.calls[1][-3:] == ["torch", "--index-url", "a b"]


def test_more_extras_keep_the_old_ones(copy: Path, pip: FakePip) -> None:
    _install(copy, "dev")
    assert pip.calls[0][-1] == ".[dev]", "no torch where no extra wants it"
    _install(copy, "decoder", "test")
    _install(copy, "dev", "test")
    assert pip.calls[1][-2:] == [".[decoder,dev,test]", "torch==2.13.0"]
    assert len(pip.calls) == 2


def test_lost_stubs_are_made_again(copy: Path, pip: FakePip) -> None:
    _install(copy, "decoder")
    (copy / "proto/hotset/v1/kvstore_pb2.py").unlink()
    _install(copy, "decoder")
    assert len(pip.calls) == 2


def test_a_failed_pip_is_tried_again(copy: Path, pip: FakePip) -> None:
    _install(copy, "decoder")
    pip.status = 1
    with pytest.raises(InstallError, match="pip failed with status 1"):
        _install(copy, "decoder", torch="torch==2.12.0")
    pip.status = 0
    _install(copy, "decoder")
    assert len(pip.calls) == 3, "the failed one may have changed the environment"
    _install(copy, "decoder")
    assert len(pip.calls) == 3


def _version(venv: Path) -> str:
    return installer.environment_version(venv)


def test_a_real_environment_is_kept_replaced_or_refused(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    assert _version(venv) == ""
    version = installer.make_environment(venv, remake=False)
    assert _version(venv) == version == "{}.{}.{}".format(*sys.version_info[:3])
    (venv / "mark").touch()
    installer.make_environment(venv, remake=True)
    assert (venv / "mark").exists(), "the same Python: nothing to replace"
    (venv / "bin/python").unlink()
    (venv / "bin/python").symlink_to("/nowhere/python")
    installer.make_environment(venv, remake=False)
    assert _version(venv) == version
    assert not (venv / "mark").exists()


def _make(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def test_make_refuses_an_unfit_python(copy: Path) -> None:
    result = _make(copy, "run", "PYTHON=false")
    assert result.returncode == 2
    assert "error: false is not Python 3.11, 3.12 or 3.13" in result.stderr
    assert not (copy / ".venv").exists()


def test_make_help_names_every_target_and_variable() -> None:
    result = _make(ROOT, "help")
    text = (ROOT / "Makefile").read_text()
    [phony] = [line for line in text.splitlines() if line.startswith(".PHONY:")]
    for target in phony.split()[1:]:
        assert f"make {target} " in result.stdout, target
    [exported] = [line for line in text.splitlines() if line.startswith("export ")]
    for variable in [*exported.split()[1:], "PYTHON", "PYTEST_ARGS"]:
        assert f"{variable}=" in result.stdout, variable

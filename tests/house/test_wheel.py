"""The wheel that images are built from: complete, and enough for kvstore without any extra."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by pip in isolation from the sources that the images copy; no stub lies there yet."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    ignore = shutil.ignore_patterns("__pycache__", "*_pb2*")
    for name in ("proto", "services"):
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    [found] = target.glob("*.whl")
    return found


def test_it_holds_every_source_and_the_stubs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for path in (ROOT / "services").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert str(path.relative_to(ROOT)) in names
    for proto in (ROOT / "proto").rglob("*.proto"):
        stem = str(proto.relative_to(ROOT / "proto").with_suffix(""))
        for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi"):
            assert f"{stem}{suffix}" in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"services", "hotset"}
    assert not [name for name in names if "__pycache__" in name]


def test_kvstore_runs_from_it_without_an_extra(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = str(venv / "bin/python")
    subprocess.run([python, "-m", "pip", "install", "-q", str(wheel)], check=True, capture_output=True)
    command = [python, "-m", "services.kvstore", "--help"]
    answer = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=True)
    assert "--arena-dir" in answer.stdout
    hotset = str(venv / "bin/hotset")
    same = subprocess.run(
        [hotset, "store", "--help"], cwd=tmp_path, env={}, capture_output=True, text=True, check=True
    )
    assert same.stdout == answer.stdout
    lacks = subprocess.run(
        [hotset, "plan", "llama"], cwd=tmp_path, env={}, capture_output=True, text=True, check=False
    )
    assert (lacks.returncode, "pip install 'hotset[decoder]'" in lacks.stderr) == (1, True)
    for absent in ("torch", "transformers", "fastapi"):
        result = subprocess.run([python, "-c", f"import {absent}"], capture_output=True, check=False)
        assert result.returncode != 0, absent

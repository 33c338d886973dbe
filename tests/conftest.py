"""Fixtures that more than one part's tests need."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.decoder.models.bundled.directory import default_model as make_default_model


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Directory of the bundled model's checkpoint, made if absent, in the cache that `make run` uses."""
    return make_default_model()

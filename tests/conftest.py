"""Fixtures that more than one part's tests need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.decoder.models.bundled.directory import default_model as make_default_model


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Directory of the bundled model's checkpoint, made if absent, in the cache that `make run` uses."""
    return make_default_model()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tiny tensors: a second thread only waits, and on a busy machine for long."""
    import torch  # most tests do without

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

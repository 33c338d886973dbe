"""The live server that clients are tried on: kvstore, front and engine with the bundled model, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.twin import MODEL, Twin, make_twin
from tests.front.real import Service, real_service


@pytest.fixture(scope="session")
def service(default_model: Path) -> Iterator[Service]:
    sizes = {"served_model_name": MODEL, "max_model_len": 2048, "max_step_tokens": 256}
    with real_service(default_model, 256 * 2**20, **sizes) as running:
        yield running


@pytest.fixture(scope="session")
def twin(service: Service) -> Twin:
    return make_twin(service.url)

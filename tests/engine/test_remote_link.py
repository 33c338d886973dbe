"""What an engine without the arena says to transports by which its bytes cannot come."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import cast

import pytest

from services.contract.errors import SetupError
from services.contract.layout import ArenaLayout
from services.contract.transport.frame import Credentials
from services.decoder.engine.remote_link import remote_arena
from services.decoder.engine.remote_session import Face, RemoteSession
from services.decoder.engine.settings import EngineSettings
from tests.kvstore.world import HEADER

LAYOUT = ArenaLayout.fit(2**24, HEADER.page_tokens, HEADER.planes)


@pytest.mark.parametrize(
    ("transport", "says"),
    [
        ("nixl", "moves whole pages by nixl, and no slots.*--data-transport ucx or tcp"),
        ("pigeon", "'pigeon'"),
    ],
)
def test_it_is_told_at_once_and_what_to_do(transport: str, says: str) -> None:
    face = Face(transport, b"somewhere", Credentials(1, 1, bytes(16)))
    session = cast("RemoteSession", SimpleNamespace(face=lambda seconds: face))
    told = {
        "ucx_tls": "tcp,self",
        "ucx_devices": "lo",
        "ucx_lanes": "any",
        "kvstore": "",
        "store_seconds": 60.0,
    }
    settings = cast("EngineSettings", SimpleNamespace(**told))
    start = time.monotonic()
    with pytest.raises(SetupError, match=says):
        remote_arena(session, settings, LAYOUT)
    assert time.monotonic() - start < 30  # not as long as it would wait for a store

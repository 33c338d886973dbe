"""One front for all tests that leave it as it was, and a maker of more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.front.live import LiveFront, live_front


@pytest.fixture(scope="session")
def front(default_model: Path) -> Iterator[LiveFront]:
    """Shared; nothing is left running on it. It must still be well at the end."""
    with live_front(default_model, "--max-body-bytes=1MiB") as live:
        yield live
        live.until_ready()
        for trouble in ("event=request_failed", "event=stream_failed", "never retrieved", "ResourceWarning"):
            assert trouble not in live.log
        assert live.noted("start"), "the fake engine left no journal"
        assert len(live.noted("start")) == 1, "the engine was started again"
        assert live.stop() == 0
        assert live.sockets == []

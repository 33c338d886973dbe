"""An engine whose start is slow where a test says, as a GPU's and a large checkpoint's are.

SLOW_START names the fault: `arena` (chunks of half a second that nothing interrupts), `chunk` (one that never
ends), `weights` (never loaded, while the arena fails).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from services.contract.errors import SetupError, Unavailable
from services.contract.layout import ArenaLayout
from services.decoder.engine.__main__ import main
from services.decoder.kv import arena_map
from services.decoder.kv.shape import KvShape
from services.decoder.models import causal_lm

CHUNKS = 100
FAULT = os.environ["SLOW_START"]


class SlowArena(arena_map.ArenaMap):
    def __init__(
        self,
        path: Path,
        layout: ArenaLayout,
        shape: KvShape,
        device: torch.device,
        *,
        progress: Callable[[int], None] = lambda registered: None,
        called_off: threading.Event | None = None,
    ) -> None:
        assert called_off is not None
        if FAULT == "weights":
            raise SetupError("cannot pin the arena, says the test")
        for chunk in range(CHUNKS):
            progress(layout.arena_bytes * chunk // CHUNKS)
            time.sleep(3600 if FAULT == "chunk" else 0.5)
            if called_off.is_set():
                raise Unavailable("the start was called off")
        super().__init__(path, layout, shape, device)


class SlowModel(causal_lm.CausalLM):
    def __init__(self, *_: object, **__: object) -> None:
        time.sleep(3600)


if __name__ == "__main__":
    arena_map.ArenaMap = SlowArena  # type: ignore[misc]  # the fault
    if FAULT == "weights":
        causal_lm.CausalLM = SlowModel  # type: ignore[misc]  # the fault
    sys.exit(main())

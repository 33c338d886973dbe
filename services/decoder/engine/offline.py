"""An engine without services: same scheduler, same runner, a private arena. For benchmarks and tests.

Knows everything that the loop knows except sockets.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from services.contract.layout import ArenaLayout
from services.decoder.engine.assembly import (
    Wrap,
    assemble,
    capacity_book,
    dense_ops,
    limits_of,
    page_hasher,
)
from services.decoder.engine.host_pages import LocalPages
from services.decoder.engine.lane_slots import lane_slots_of
from services.decoder.engine.latent_assembly import WrapTokens
from services.decoder.engine.loads_beside import loads_beside
from services.decoder.engine.memory_plan import MemoryPlan, device_room, kv_fingerprint, kv_planes, kv_shape
from services.decoder.engine.model_settings import settings_for
from services.decoder.engine.scheduler import Scheduler
from services.decoder.engine.sequence import Sequence
from services.decoder.engine.step_plan import StepPlan
from services.decoder.engine.stepper import News, Stepper
from services.decoder.kv.arena_map import ArenaMap
from services.decoder.kv.device_pages import DevicePages
from services.decoder.models.causal_lm import CausalLM, resolve_device, resolve_dtype
from services.decoder.models.spec import ModelSpec
from services.decoder.settings import DecoderSettings


class OfflineEngine:
    """Its arena's file has no name, so nothing is left behind however the process ends."""

    def __init__(
        self,
        settings: DecoderSettings,
        arena_bytes: int,
        model: CausalLM | None = None,
        wrap: Wrap = lambda layer, selector: selector,
        wrap_tokens: WrapTokens = lambda layer, selector: selector,
    ) -> None:
        """Load the model, or take a loaded one with its spec and dtype; the wraps as assembly.py says."""
        device = resolve_device(settings.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of what names no device: streams, events, kernels
        if model is None:
            spec = ModelSpec.read(settings.model)
            model = CausalLM(spec, resolve_dtype(settings.dtype, device), device, dense=dense_ops(device))
        spec, self.model = model.spec, model
        settings = settings_for(settings, spec)
        shape = kv_shape(settings, spec, self.model.dtype)
        layout = ArenaLayout.fit(arena_bytes, shape.page_tokens, kv_planes(settings, shape))
        room, lane_slots = device_room(settings, device), lane_slots_of(settings, device)
        self.plan = MemoryPlan.derive(
            settings, spec, shape, layout, self.model.weight_bytes, device, room, lane_slots
        )
        descriptor, path = tempfile.mkstemp(prefix="hotset-offline-", dir="/dev/shm")
        try:
            os.ftruncate(descriptor, arena_bytes)
            self.arena = ArenaMap(Path(path), layout, shape, device)
        finally:
            os.close(descriptor)
            Path(path).unlink()  # the mapping keeps the bytes
        self.host = LocalPages(layout.page_count)
        self.device_pages = DevicePages(self.plan.device_pages)
        hasher = page_hasher(self.plan, kv_fingerprint(spec, shape))
        book = capacity_book(self.plan)
        self.scheduler = Scheduler(
            limits_of(self.plan),
            self.host,
            self.device_pages,
            hasher,
            book,
            share_device_pages=settings.share_device_pages,
            loads_beside=loads_beside(device),
        )
        self.runner = assemble(self.plan, self.model, self.arena, device, wrap, wrap_tokens)
        self.on_plan: Callable[[StepPlan], None] = lambda plan: None
        self._stepper = Stepper(self.scheduler, self.runner, nullcontext(), lambda plan: self.on_plan(plan))

    def generate(self, sequences: list[Sequence]) -> None:
        """Run until every sequence has ended; the answers are in the sequences."""
        for sequence in sequences:
            self.scheduler.submit([sequence])
        while self._stepper.has_work:
            self.step()

    def step(self) -> News:
        """One step; what it came to for clients."""
        return self._stepper.step()[1]

    def counters(self) -> torch.Tensor:
        """[layers, len(Counter)] int64."""
        return self.runner.residence.counters

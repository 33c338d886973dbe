"""How many hot slots of a lane a device can order: what a plan asks of a card besides its memory.

Knows the settings that resolve's shared memory follows from; not what lies in it.
"""

from __future__ import annotations

import torch

from services.decoder.engine.hot_plan import MOST_LANE_SLOTS
from services.decoder.kv.hot_class import parcel_slots_for
from services.decoder.settings import DecoderSettings


def lane_slots_of(settings: DecoderSettings, device: torch.device) -> int:
    """For the lanes of layers that choose; the twins order any number."""
    if device.type != "cuda":
        return MOST_LANE_SLOTS
    from services.decoder.kernels.gpu.resolve import ResolveShape  # needs the gpu extra

    block = settings.block_tokens
    a_parcel = parcel_slots_for(settings.floor_tokens // block)
    return min(MOST_LANE_SLOTS, ResolveShape.most_slots(settings.budget_tokens // block, a_parcel))

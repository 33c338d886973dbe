"""What a device is like, as far as it decides which variant of a kernel is compiled for it.

The one place that asks. Knows no kernel: each shape's `fitting` follows these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.contract.errors import SetupError


@dataclass(frozen=True, slots=True)
class Card:
    """A device's limits."""

    name: str
    major: int  # of its compute capability
    multiprocessors: int
    shared_bytes: int  # shared memory that a thread block can have at most, static and dynamic together

    @classmethod
    def current(cls) -> Card:
        """Of torch's current device."""
        device = torch.cuda.get_device_properties()
        most: int = device.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch's stub lacks it
        return cls(device.name, device.major, device.multi_processor_count, most)

    @property
    def has_clusters(self) -> bool:
        """Whether thread blocks reach each other's shared memory, and bulk copies fill it."""
        return self.major >= 9

    def refusal(self, what: str, needed_bytes: int, instead: str) -> SetupError:
        """What to raise where no variant fits.

        Args:
            what: the kernel, and of what sizes.
            needed_bytes: shared memory of the smallest variant.
            instead: what its user can change.
        """
        return SetupError(
            f"{what} needs {needed_bytes:,} bytes of a thread block's shared memory; {self.name} has "
            f"{self.shared_bytes:,}; {instead}"
        )

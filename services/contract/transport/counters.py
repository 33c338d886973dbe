"""What a transport has moved and what went wrong, as numbers that only grow.

Knows nothing of Prometheus. One thread counts, any thread reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.contract.transport.faults import Fault


@dataclass(slots=True)
class TransportCounters:
    """Of one end of one transport."""

    requests: int = 0  # sent by a requester, answered by a responder
    sent_bytes: int = 0  # frames included
    received_bytes: int = 0
    faults: dict[Fault, int] = field(default_factory=lambda: dict.fromkeys(Fault, 0))

    def fault(self, fault: Fault) -> None:
        """Count one."""
        self.faults[fault] += 1

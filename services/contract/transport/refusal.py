"""How "no" travels: the kind of fault, the class of the error and its text.

Knows the error tree; not why anything was refused.
"""

from __future__ import annotations

from services.contract.errors import HotsetError, error_named
from services.contract.transport.faults import Fault, TransportFault

MAX_REFUSAL_BYTES = 1024


def write_refusal(fault: Fault, error: HotsetError) -> bytes:
    """The body of a refusal."""
    return f"{fault.value}\n{type(error).__name__}\n{error}".encode()[:MAX_REFUSAL_BYTES]


def read_refusal(body: memoryview) -> HotsetError:
    """The error to raise at the asker's: the service's own, or a fault of the transport."""
    kind, _, rest = bytes(body).decode("utf-8", "replace").partition("\n")
    name, _, text = rest.partition("\n")
    if kind == Fault.REFUSED:
        return error_named(name, text)
    fault = Fault(kind) if kind in list(Fault) else Fault.LENGTH
    return TransportFault(fault, f"the peer refused: {text}")

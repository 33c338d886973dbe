"""What is freed stays with the process: the same temporaries again cost no page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import resource
from services.decoder.engine.host_allocator import keep_freed_memory
{call}
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    temporaries = [bytearray(2**24) for _ in range(12)]
    del temporaries
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


def _faults(call: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(call=call)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_kept() -> None:
    assert _faults("keep_freed_memory()") < 100
    assert _faults("") > 1000, "this allocator keeps it anyway, and the call is of no use"

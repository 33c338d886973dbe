"""Run as a script: ties this process's life to its parent's, then becomes another program.

    python tether.py PARENT_PID PROGRAM [ARGUMENT ...]

The kernel sends SIGKILL when the parent's thread that started this one ends, however it ends, and the
tie outlives exec. Done here, not between fork and exec in the parent, which has gRPC's threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def become(parent: int, command: Sequence[str]) -> None:
    """Tie, then exec; does not return.

    Raises:
        OSError: the kernel refuses the tie, or the program cannot be started.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit("the parent ended before this process was tied to it")
    os.execv(command[0], list(command))


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])

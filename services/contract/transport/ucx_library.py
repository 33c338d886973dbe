"""The one place that imports ucxx, when the first worker is made, and what UCX must be told before that.

Knows names and versions; what is done with them is ucx_worker.py's affair.

UCX reads its environment as it is loaded. What an operator has set stays as it is; these are the defaults:

    UCX_MM_ERROR_HANDLING=y          without it, asking for error handling drops shared memory, silently
    UCX_KEEPALIVE_INTERVAL=1s        a killed peer is noticed
    UCX_RCACHE_MAX_UNRELEASED=1024   the cache of registrations lets go of what is gone
    UCX_RNDV_THRESH=intra:inf,...    requests are eager, so that all of one has arrived or nothing; over
                                     shared memory answers are too: else 300 KB take twice as long (0.70
                                     against 0.37 ms on two shared cores, November 2026)
    UCX_MM_FIFO_SIZE=1024            8 MB of shared memory a worker: 4 MB leave without waiting to be taken
    UCX_LOG_FILE=stderr              standard output is for those who started us
    UCX_WARN_UNUSED_ENV_VARS=n       of the above, not every lane knows every one
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.contract.errors import SetupError

_DEFAULTS: Mapping[str, str] = {
    "UCX_MM_ERROR_HANDLING": "y",
    "UCX_KEEPALIVE_INTERVAL": "1s",
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    "UCX_RNDV_THRESH": "intra:inf,inter:2m",
    "UCX_MM_FIFO_SIZE": "1024",
    "UCX_LOG_FILE": "stderr",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}


@dataclass(frozen=True, slots=True)
class UcxLibrary:
    """ucxx's core API: the names that we use. ucxx has no types of its own to check against."""

    core: Any  # ucxx._lib.libucxx
    array: Any  # ucxx._lib.arr.Array
    version: str  # of UCX


def load_ucx() -> UcxLibrary:
    """Import ucxx.

    Raises:
        SetupError: it is not installed, or cannot be loaded here.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        import ucxx
        from ucxx._lib import arr, libucxx
    except ImportError as error:
        raise SetupError(
            f"the transport ucx needs ucxx, which cannot be loaded ({error}); pip install 'hotset[ucx]', "
            "or use the transport tcp"
        ) from error
    return UcxLibrary(libucxx, arr.Array, ".".join(map(str, ucxx.get_ucx_version())))

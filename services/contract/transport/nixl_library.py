"""The one place that imports nixl, when the first agent is made, and what UCX must be told before that.

Knows names and versions; what is done with them is nixl_agent.py's affair. We use the bindings below nixl's
Python layer, because that one lets a source spin on a whole core; hence one minor version only. nixl brings a
UCX of its own, so a process that has loaded ucxx's must not load this one too: names of both would mix.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from services.contract.errors import SetupError

INSTALL = "pip install xxhash && pip install --no-deps 'nixl-cu13>=1.5,<1.6'"
_VERSION = "1.5."
_DEFAULTS: Mapping[str, str] = {  # the reasons stand in ucx_library.py
    "UCX_MM_ERROR_HANDLING": "y",
    "UCX_KEEPALIVE_INTERVAL": "1s",
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    "UCX_LOG_FILE": "stderr",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}


@dataclass(frozen=True, slots=True)
class NixlLibrary:
    """nixl's bindings, which have no types of their own to check against."""

    core: Any  # nixl_cu13._bindings
    version: str


def load_nixl() -> NixlLibrary:
    """Import nixl.

    Raises:
        SetupError: it is not installed, of another version, or this process has ucxx loaded.
    """
    if "ucxx" in sys.modules:
        raise SetupError(
            "nixl and ucxx bring a UCX each, and a process can have one; use one of the transports"
        )
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    told = logging.raiseExceptions
    try:
        from nixl_cu13 import _bindings as core
    except ImportError as error:
        raise SetupError(
            f"the transport nixl needs nixl-cu13, which cannot be loaded ({error}); {INSTALL}, "
            "or use the transport ucx or tcp"
        ) from error
    # Importing it changes how this process logs, and would have it log to standard output.
    logging.raiseExceptions = told
    logging.getLogger("nixl").handlers.clear()
    found = version("nixl-cu13")
    if not found.startswith(_VERSION):
        raise SetupError(f"the transport nixl needs nixl-cu13 {_VERSION}x and finds {found}; {INSTALL}")
    return NixlLibrary(core, found)

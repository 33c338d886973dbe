"""`hotset store`: this process becomes kvstore, with the flags as they are."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn


def run(arguments: Sequence[str]) -> NoReturn:
    """Does not return."""
    os.execv(sys.executable, [sys.executable, "-m", "services.kvstore", *arguments])

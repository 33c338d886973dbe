"""What makes a start short: work beside the main line of it, on threads that nothing has to wait for.

Knows threads, and that an arena can be faulted in before anyone attaches; the order of a start is `load`'s.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar

from services.contract.errors import HotsetError
from services.decoder.engine.store_session import StoreSession
from services.decoder.kv.fault_in import fault_in_file

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_U = TypeVar("_U")

THREAD_PREFIX = "start-"


def at_once(first: Callable[[], _T], second: Callable[[], _U]) -> tuple[_T, _U]:
    """The results of both, computed at the same time; the first failure of either is raised at once.

    The other one then goes on, on a daemon thread whose name begins with THREAD_PREFIX: tell it to stop, or
    leave the process without waiting for it.
    """
    one, other = _begin(first), _begin(second)
    parts: tuple[Future[Any], ...] = (one, other)
    for ended in wait(parts, return_when=FIRST_EXCEPTION).done:
        ended.result()
    return one.result(), other.result()


def _begin(work: Callable[[], _T]) -> Future[_T]:
    result: Future[_T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001  # raised by the one who asks for the result
            result.set_exception(error)

    threading.Thread(target=run, name=THREAD_PREFIX + "work", daemon=True).start()
    return result


def fault_in_early(store: StoreSession, wait_seconds: float, called_off: threading.Event) -> None:
    """Begin to bring the arena's pages into memory, and return: they come while the engine still imports.

    Only for an engine that will register the arena with a GPU. A failure is told by whoever maps it later.
    """

    def run() -> None:
        began = time.monotonic()
        try:
            fault_in_file(store.find(wait_seconds), called_off)
        except (HotsetError, OSError) as error:
            _log.info("arena_not_faulted_in_early reason=%r", str(error))
        else:
            _log.info("arena_faulted_in seconds=%.2f", time.monotonic() - began)

    threading.Thread(target=run, name=THREAD_PREFIX + "fault-in", daemon=True).start()

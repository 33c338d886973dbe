"""How long processes sat and waited, which is the same on every machine; how long they took is not.

Knows thread states as Linux tells them; nothing of what is waited for.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Self

_LOOK_SECONDS = 0.01
_WANTS_TO_RUN = "RD"  # on a core or waiting for one; or for a disk


class Waiting:
    """Adds up, while it is entered, the time in which no thread of some processes wanted to run.

    What a thread needs a core for counts as nothing, however long the machine lets it wait for one; a timer
    that it waits for counts in full, and so does an answer. A look that comes late counts as one.
    """

    def __init__(self, *processes: int) -> None:
        """`processes` by id; one that is gone wants nothing. None at all: the thread that enters."""
        self._processes = processes
        self._looks = 0
        self._ended = threading.Event()

    @property
    def seconds(self) -> float:
        """So far, within a hundredth or so."""
        return self._looks * _LOOK_SECONDS

    def __enter__(self) -> Self:
        places = [Path(f"/proc/{process}/task") for process in self._processes]
        own = [Path(f"/proc/self/task/{threading.get_native_id()}")]

        def look() -> None:
            while not self._ended.wait(_LOOK_SECONDS):
                self._looks += not any(map(_wants_to_run, own if not places else _threads(places)))

        self._looking = threading.Thread(target=look, name="waiting")
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._looking.join()


def _threads(processes: list[Path]) -> list[Path]:
    found = []
    for process in processes:
        try:
            found += list(process.iterdir())
        except OSError:  # it is gone
            continue
    return found


def _wants_to_run(thread: Path) -> bool:
    try:
        state = (thread / "stat").read_text()
    except OSError:
        return False
    return state[state.rindex(")") + 2] in _WANTS_TO_RUN

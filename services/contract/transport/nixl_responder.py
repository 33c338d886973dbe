"""Offers a file to be read over nixl, by a process of its own, and starts another when that ends.

Nobody asks: peers read, so no request is seen here, counted or refused. Knows the process; who is told the
address, its owner decides: **whoever is may read and write all of the file**.

A process of its own, because over lanes in software UCX ends the process of a source whose reader went away
at the wrong moment (`ucp_request.inl: Fatal`, 1.21). So that costs those who read a new address, and the
owner nothing.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

from services.contract.errors import SetupError
from services.contract.transport.counters import TransportCounters
from services.contract.transport.faults import Fault
from services.contract.transport.ucx_lanes import may_use
from services.contract.transport.ucx_worker import UcxOptions

_log = logging.getLogger(__name__)
_MODULE = "services.contract.transport.nixl_child"
_PAUSE_SECONDS = 0.5  # before another is started: what ended one may end the next
_END_SECONDS = 1.0


class NixlResponder:
    """A Responder; see protocol.py. Its address changes with the process, empty while there is none."""

    held_bytes = 0  # nothing is answered
    _child: subprocess.Popen[str]

    def __init__(self, options: UcxOptions, file: Path, counters: TransportCounters) -> None:
        """Offer `file`, which is as long as it will be.

        Raises:
            SetupError: nixl or xxhash is missing, or nixl cannot be set up as `options` say.
        """
        told = (str(file), options.tls, options.devices, options.lanes)
        self._command = [sys.executable, "-m", _MODULE, *told]
        self._lanes = may_use(options.tls, options.lanes)
        self._counters = counters
        self._closing = threading.Event()
        self.address = b""
        self._start()
        self._thread = threading.Thread(target=self._watch, name="data-nixl", daemon=True)
        self._thread.start()

    @property
    def lanes(self) -> tuple[str, ...]:
        """What may carry the bytes: nixl does not tell who reads, nor by what."""
        return self._lanes if self.address else ()

    def close(self) -> None:
        """As the Protocol says."""
        self._closing.set()
        _end(self._child)
        self._thread.join()
        self.address = b""

    def _start(self) -> None:
        # Its own session: an interrupt from the keyboard is ours to answer.
        self._child = child = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert child.stdout is not None
        said = child.stdout.readline().strip()
        child.stdout.close()
        if not said or said.startswith("error"):
            _end(child)
            raise SetupError(said.removeprefix("error: ") or "nixl's process ended as it started; see above")
        self.address = bytes.fromhex(said)

    def _watch(self) -> None:
        while True:
            status = self._child.wait()
            self.address = b""
            _end(self._child)
            if self._closing.is_set():
                return
            self._counters.fault(Fault.LOST)
            _log.warning("nixl_ended status=%d effect='peers connect anew'", status)
            while not self._closing.wait(_PAUSE_SECONDS):
                try:
                    self._start()
                    break
                except (OSError, SetupError) as error:
                    _log.warning("nixl_not_started error=%s", error)
            if self._closing.is_set():
                _end(self._child)
                self.address = b""
                return


def _end(child: subprocess.Popen[str]) -> None:
    """Let it end, or end it."""
    assert child.stdin is not None
    child.stdin.close()
    try:
        child.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()

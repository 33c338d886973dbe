"""The front's life: listen, keep engines running, serve, end in order. Wires the parts together.

The end, at SIGTERM or Ctrl-C: new requests are refused, running ones get `shutdown_seconds` and are then
cut short with an error; the HTTP server closes; the engines get SIGTERM, then SIGKILL; the sockets'
directory goes. A second signal kills the engines and ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry, disable_created_metrics

from services.contract.errors import SetupError
from services.decoder.front.app import build_app
from services.decoder.front.collector import EngineCollector, EnginesCollector
from services.decoder.front.engines import EngineCommand, Engines
from services.decoder.front.listener import listen, url_of
from services.decoder.front.request_metrics import RequestMetrics
from services.decoder.front.role import role_of
from services.decoder.front.running import Running
from services.decoder.front.state import FrontState
from services.decoder.front.text.chat import ChatTemplate
from services.decoder.front.text.tokenizer import TextTokenizer
from services.decoder.settings import DecoderSettings

_CLOSE_SECONDS = 1
"""How long open connections get once no request runs any more."""
_LONGEST_SOCKET_PATH = 100  # Linux takes 107 bytes

_log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers; ours come first (Life)."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run_front(settings: DecoderSettings, engine_command: EngineCommand) -> int:
    """Serve until a signal; returns the exit status.

    Args:
        settings: the operator's.
        engine_command: how each engine is started.

    Raises:
        SetupError: the model's text files, the port, or the engine's first start.
    """
    tokenizer = TextTokenizer.from_directory(settings.model)
    template = ChatTemplate.from_directory(settings.model)
    if settings.store_access == "remote":
        _log.warning(
            "store_access_remote kvstore=%s effect=%r",
            settings.kvstore,
            "every miss is asked for over the network: the same answers, slower",
        )
    listener = listen(settings.host, settings.port)
    directory = Path(tempfile.mkdtemp(prefix="hotset-"))  # mode 0700
    try:
        if len(os.fsencode(directory)) > _LONGEST_SOCKET_PATH - len("/engine00-1000.sock"):
            raise SetupError(f"{directory} is too long a path for a socket; set TMPDIR to a shorter one")
        engines = Engines(engine_command, directory, len(settings.devices))
        life = _Life(settings, tokenizer, template, listener, engines)
        return asyncio.run(life.run())
    finally:
        listener.close()
        shutil.rmtree(directory, ignore_errors=True)


class _Life:
    """Everything between a listening socket and its close."""

    def __init__(
        self,
        settings: DecoderSettings,
        tokenizer: TextTokenizer,
        template: ChatTemplate,
        listener: socket.socket,
        engines: Engines,
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # untyped in prometheus-client
        registry = CollectorRegistry()
        collector = EnginesCollector([EngineCollector(one) for one in engines.supervisors])
        registry.register(collector)
        model = settings.served_model_name or settings.model.resolve().name
        self._front = FrontState(
            model=model,
            created=int(time.time()),
            restart_seconds=settings.restart_seconds,
            tokenizer=tokenizer,
            template=template,
            engines=engines,
            running=Running(),
            metrics=RequestMetrics(registry, range(len(engines.supervisors))),
            collector=collector,
            role=role_of(settings, model),
            most_urgent=settings.most_urgent,
        )
        app = build_app(
            self._front,
            registry,
            api_keys=settings.api_keys,
            urgent_keys=settings.urgent_keys,
            max_body_bytes=settings.max_body_bytes,
            dashboards_url=settings.dashboards_url,
        )
        self._server = _Server(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=_CLOSE_SECONDS,
            )
        )
        self._listener = listener
        self._shutdown_seconds = settings.shutdown_seconds
        self._asked = asyncio.Event()

    async def run(self) -> int:
        """Serve until asked to end.

        Raises:
            SetupError: the engine's first start failed.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        serving = loop.create_task(self._server.serve(sockets=[self._listener]))
        engine = loop.create_task(self._front.engines.run())
        asked = loop.create_task(self._asked.wait())
        gc.collect()
        gc.freeze()  # no token need wait for a collection among what stays until the end
        _log.info("listening url=%s model=%s", url_of(self._listener), self._front.model)
        try:
            await asyncio.wait((serving, engine, asked), return_when=asyncio.FIRST_COMPLETED)
            if self._asked.is_set():
                _log.info("draining running=%d seconds=%g", len(self._front.running), self._shutdown_seconds)
                await self._front.running.drain(self._shutdown_seconds)
            return 0
        finally:
            self._server.should_exit = True
            failure = engine.exception() if engine.done() and not engine.cancelled() else None
            engine.cancel()
            asked.cancel()
            await asyncio.gather(serving, engine, return_exceptions=True)
            _log.info("stopped")
            if failure is not None:
                raise failure

    def _on_signal(self, number: int) -> None:
        if self._asked.is_set():
            self._front.engines.kill()
            # Nothing may wait any more; the socket's directory is all that has to be cleared away.
            self._front.engines.remove_directory()
            os._exit(128 + number)
        _log.info("signal name=%s", signal.Signals(number).name)
        self._asked.set()

"""What every route needs, put together once at start and passed by hand."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from fastapi import FastAPI, Request
from hotset.v1 import engine_pb2

from services.decoder.front.collector import EnginesCollector
from services.decoder.front.engines import Engines
from services.decoder.front.errors import ModelNotFound, PriorityNotAllowed
from services.decoder.front.request_metrics import RequestMetrics
from services.decoder.front.role import Role
from services.decoder.front.running import Running
from services.decoder.front.text.chat import ChatTemplate
from services.decoder.front.text.tokenizer import TextTokenizer
from services.decoder.front.version import version


@dataclass(frozen=True)
class FrontState:
    """The parts of the front.

    Attributes:
        model: the name clients use.
        created: when this server began, Unix seconds.
        restart_seconds: how long requests of an engine that died wait for its next life.
        most_urgent: the lowest priority that a request may ask for without a key that allows any.
    """

    model: str
    created: int
    restart_seconds: float
    tokenizer: TextTokenizer
    template: ChatTemplate
    engines: Engines
    running: Running
    metrics: RequestMetrics
    collector: EnginesCollector
    role: Role = field(default_factory=Role)
    most_urgent: int = 0

    def check_model(self, name: str | None) -> None:
        """Refuse a request for a model that is not served here; None stands for the one that is.

        Raises:
            ModelNotFound: another name.
        """
        if name is not None and name != self.model:
            raise ModelNotFound(
                f"the model '{name[:200]}' does not exist here; this server serves '{self.model}'",
                param="model",
            )

    def check_priority(self, asked: int | None, *, may_be_urgent: bool) -> None:
        """Refuse a request that asks to run before others without having the right to.

        Raises:
            PriorityNotAllowed: `asked` is below the limit, and the request's key does not lift it.
        """
        if asked is not None and asked < self.most_urgent and not may_be_urgent:
            raise PriorityNotAllowed(
                f"priority {asked} is more urgent than this request may be: {self.most_urgent} is the lowest "
                "(--most-urgent of the server), unless it comes with one of the server's --urgent-keys",
                param="priority",
            )

    def engine(self) -> engine_pb2.EngineDescription:
        """What the engines that take new requests said of themselves.

        Raises:
            ShuttingDown: nothing new is taken.
            EngineNotReady: none serves.
        """
        self.running.check_open()
        self.engines.check_ready()
        description = self.engines.description
        assert description is not None, "an engine serves that never described itself"
        return description

    def fingerprint(self, engine: engine_pb2.EngineDescription) -> str:
        """Changes with whatever may change the answer to the same seed."""
        device, kept = engine.device.split(":")[0], (engine.record_dtype, engine.index_dtype)
        parts = (version(), self.model, engine.kv_mode, engine.dtype, device, *kept)
        kind = "probe_no_io_" if engine.probe_no_io else "hits_first_" if engine.hits_first else "fp_"
        return kind + hashlib.blake2b("\n".join(parts).encode(), digest_size=6).hexdigest()


def attach(app: FastAPI, state: FrontState) -> None:
    """Make `state` what `front_state` finds."""
    app.state.front = state


def front_state(request: Request) -> FrontState:
    """The parts of the front that serves this request."""
    state = request.app.state.front
    assert isinstance(state, FrontState)
    return state

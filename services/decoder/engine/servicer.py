"""The engine's gRPC face: translates engine.proto to the loop's calls and back.

Decides nothing. Errors leave as exceptions of the tree; the contract's interceptor maps them.
"""

from __future__ import annotations

import queue
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import numpy as np
from hotset.v1 import engine_pb2 as pb
from hotset.v1 import engine_pb2_grpc as pb_grpc

from services.contract.byte_size import format_bytes
from services.contract.errors import SetupError, Unavailable
from services.decoder.engine.device_times import DeviceTimes
from services.decoder.engine.request_check import check_request
from services.decoder.engine.sequence import Finish, SampledToken, Sampling, Sequence
from services.decoder.engine.store_session import StoreSession
from services.decoder.kernels.counter import Counter
from services.decoder.kv.device_pages import DevicePages
from services.decoder.kv.miss_curve import CAPACITIES

if TYPE_CHECKING:  # the face answers before torch is there, which takes seconds to import
    from services.decoder.engine.loop import Loop
    from services.decoder.engine.memory_plan import MemoryPlan
    from services.decoder.engine.runner import Runner
    from services.decoder.engine.stepper import News
    from services.decoder.models.spec import ModelSpec

_POLL_SECONDS = 0.5  # how long a subscriber that went away may go unnoticed

_FINISH = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    Finish.STOP: pb.FINISH_REASON_STOP,
    Finish.LENGTH: pb.FINISH_REASON_LENGTH,
    Finish.ABORT: pb.FINISH_REASON_ABORT,
    Finish.ERROR: pb.FINISH_REASON_ERROR,
    Finish.NO_ROOM: pb.FINISH_REASON_NO_ROOM,
}


@dataclass(frozen=True, slots=True)
class Served:
    """What there is once the engine is ready."""

    spec: ModelSpec
    plan: MemoryPlan
    loop: Loop
    runner: Runner
    device_pages: DevicePages
    store: StoreSession
    device: str


class EngineServicer(pb_grpc.EngineServicer):
    """Answers Describe from the first moment; the rest once `serve` was called."""

    def __init__(self) -> None:
        self._state = pb.EngineDescription(state=pb.ENGINE_STATE_STARTING, detail="starting")
        self._arena_bytes = self._arena_registered = 0
        self._served: Served | None = None
        self._ending = False
        self._batches: queue.SimpleQueue[pb.EventBatch] = queue.SimpleQueue()

    def progress(self, detail: str) -> None:
        """Say what the start is busy with."""
        self._state = pb.EngineDescription(state=pb.ENGINE_STATE_STARTING, detail=detail)

    def arena(self, registered: int, length: int) -> None:
        """Say how many of the arena's bytes the GPU can reach by now, beside what `progress` says."""
        self._arena_registered, self._arena_bytes = registered, length

    def fail(self, error: SetupError) -> None:
        """Say why the start failed."""
        self._state = pb.EngineDescription(state=pb.ENGINE_STATE_FAILED, detail=str(error))

    def serve(self, served: Served) -> None:
        """From now on requests are taken."""
        self._served = served
        self._arena_bytes = served.plan.layout.arena_bytes
        settings = served.plan.settings
        self._state = pb.EngineDescription(
            state=pb.ENGINE_STATE_READY,
            max_model_len_tokens=served.plan.max_model_len,
            vocab_size=served.spec.vocab_size,
            eos_token_ids=served.spec.eos_token_ids,
            kv_mode=settings.kv_mode,
            probe_no_io=settings.probe_no_io,
            hits_first=settings.hits_first,
            record_dtype=settings.record_dtype,
            index_dtype=settings.index_dtype,
            dtype=str(served.plan.shape.dtype).removeprefix("torch."),
            device=served.device,
            max_rows=settings.max_rows,
            max_waiting=settings.max_waiting,
            arena_pages=served.plan.layout.page_count,
        )

    def stop(self) -> None:
        """Let the loop end after its step, and subscribers go."""
        self._ending = True
        if self._served is not None:
            self._served.loop.stop()

    def publish(self, news: News) -> None:
        """Queue one step's events for the subscriber; called by the loop."""
        if news:
            self._batches.put(pb.EventBatch(events=[_event(sequence, tokens) for sequence, tokens in news]))

    def Describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.EngineDescription:
        """What is served, or how far the start is."""
        told = pb.EngineDescription(
            arena_bytes=self._arena_bytes, arena_registered_bytes=self._arena_registered
        )
        told.MergeFrom(self._state)
        if told.state == pb.ENGINE_STATE_STARTING and told.arena_registered_bytes < told.arena_bytes:
            done, whole = format_bytes(told.arena_registered_bytes), format_bytes(told.arena_bytes)
            told.detail += f"; the GPU reaches {done} of the arena's {whole}"
        return told

    def Submit(self, request: pb.SubmitRequest, context: grpc.ServicerContext) -> pb.SubmitReply:
        """Queue a request."""
        served = self._ready()
        check_request(request, served.spec.vocab_size)
        served.loop.submit(sequences_of(request, served.spec.eos_token_ids))
        if not context.is_active():
            # The caller gave up, and its Abort may have come while this was on its way.
            served.loop.abort(request.request_id, set())
        return pb.SubmitReply()

    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortReply:
        """End choices."""
        self._ready().loop.abort(request.request_id, set(request.choices))
        return pb.AbortReply()

    def Events(self, request: pb.EventsRequest, context: grpc.ServicerContext) -> Iterator[pb.EventBatch]:
        """Every step's events, as long as the subscriber stays."""
        while context.is_active() and not self._ending:
            try:
                yield self._batches.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue

    def Stats(self, request: pb.EngineStatsRequest, context: grpc.ServicerContext) -> pb.EngineStats:
        """Gauges and counters."""
        served = self._ready()
        stats, hot = served.loop.stats(), served.runner.residence.hot_slots()
        clock, curve = served.runner.clock, served.runner.residence.curve
        times = DeviceTimes() if clock is None else clock.times
        return pb.EngineStats(
            requests_running=stats.running,
            requests_waiting=stats.waiting,
            requests_parked=stats.parked,
            rows_parked=stats.parkings,
            pages_given_up=stats.releases,
            prompt_tokens=stats.prompt_tokens,
            generation_tokens=stats.generation_tokens,
            cached_prompt_tokens=stats.cached_prompt_tokens,
            integrity_violations=stats.integrity_violations,
            decode_steps=times.steps,
            decode_ns=times.decode_ns,
            device_busy_ns=times.busy_ns,
            device_idle_ns=times.idle_ns,
            steps=stats.steps,
            step_ns=stats.step_ns,
            steps_planned=stats.planned,
            layers=[
                pb.LayerStats(
                    layer=layer,
                    chosen_blocks=row[Counter.CHOSEN],
                    hits=row[Counter.HITS],
                    misses=row[Counter.MISSES],
                    evictions=row[Counter.EVICTIONS],
                    fetched_bytes=row[Counter.FETCHED_BYTES],
                    resolve_ns=row[Counter.NANOSECONDS],
                )
                for layer, row in enumerate(served.runner.residence.counters.tolist())
            ],
            rows_total=served.plan.settings.max_rows,
            rows_used=stats.rows_used,
            device_pages_total=served.device_pages.count,
            device_pages_used=served.device_pages.count - served.device_pages.free,
            hot_slots_total=hot.total,
            hot_slots_used=hot.used,
            hot_row_tokens_least=stats.hot.least_tokens,
            hot_row_tokens_most=stats.hot.most_tokens,
            hot_rows_whole=stats.hot.whole,
            hot_resizes=stats.hot.resizes,
            host_pages_held=served.store.held,
            sampled_blocks=0 if curve is None else curve.chosen,
            curve=[] if curve is None else map(_point, CAPACITIES, curve.misses),
        )

    def _ready(self) -> Served:
        if self._served is None:
            raise Unavailable(f"the engine is not ready: {self._state.detail}")
        return self._served


def sequences_of(request: pb.SubmitRequest, eos: tuple[int, ...]) -> list[Sequence]:
    """One sequence a choice."""
    wish = request.sampling
    sampling = Sampling(
        temperature=wish.temperature,
        top_p=wish.top_p or 1.0,
        top_k=wish.top_k,
        min_p=wish.min_p,
        frequency_penalty=wish.frequency_penalty,
        presence_penalty=wish.presence_penalty,
        repetition_penalty=wish.repetition_penalty or 1.0,
        logit_bias=tuple(sorted(wish.logit_bias.items())),
        logprobs=wish.logprobs,
        top_logprobs=wish.top_logprobs,
        prompt_logprobs=wish.prompt_logprobs,
    )
    stop = {*request.stop_token_ids, *(() if request.ignore_eos else eos)}
    prompt = array("I", np.asarray(request.prompt_tokens, np.uint32).tobytes())
    return [
        Sequence(
            request_id=request.request_id,
            choice=choice.index,
            prompt=prompt,
            sampling=sampling,
            seed=choice.seed,
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            stop_ids=frozenset(stop),
            priority=request.priority,
            known=list(choice.generated_tokens),
            salt=request.cache_salt,
            reported=len(choice.generated_tokens),
        )
        for choice in request.choices
    ]


def _event(sequence: Sequence, tokens: list[SampledToken]) -> pb.TokenEvent:
    first = sequence.reported == len(tokens)
    return pb.TokenEvent(
        request_id=sequence.request_id,
        choice=sequence.choice,
        tokens=map(_token, tokens),
        finish_reason=_FINISH[sequence.finish],
        error=sequence.error,
        cached_prompt_tokens=sequence.cached if first else 0,
        prompt=map(_token, sequence.prompt_logprobs) if first else (),
    )


def _point(size: float, misses: int) -> pb.CurvePoint:
    return pb.CurvePoint(size=size, misses=misses)


def _token(sampled: SampledToken) -> pb.Token:
    return pb.Token(
        id=sampled.token,
        logprob=sampled.logprob,
        top=[pb.TopLogprob(id=token, logprob=value) for token, value in sampled.top],
    )

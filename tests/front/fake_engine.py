"""An engine without a model: engine.proto on a real Unix socket, tokens as the test says, faults on demand.

What a request is to get is told in its `cache_salt`, as JSON (see Orders); without one it gets numbers that
depend on its seed. How the process starts is told in FAKE_ENGINE (see Start). What it was asked is written
to FAKE_ENGINE_JOURNAL, a JSON line each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format
from hotset.v1 import engine_pb2 as pb
from hotset.v1 import engine_pb2_grpc as pb_grpc

from services.contract import errors
from services.contract.channel import SERVER_OPTIONS
from services.contract.rpc_errors import ErrorInterceptor
from services.decoder.front.text.tokenizer import TextTokenizer
from services.decoder.settings import DecoderSettings


class FakeSettings(DecoderSettings):
    engine_socket: str
    engine_index: int


@dataclass(frozen=True)
class Start:
    delay: float = 0.0  # seconds of STARTING
    fail: str = ""  # FAILED with this reason
    exit: int | None = None  # end with this status, with a line on standard error, before listening
    second_fails: bool = False  # the second life of the engine ends with status 3
    later_fail: str = ""  # every life but the first is FAILED with this reason
    later_delay: float = 0.0  # seconds of STARTING of every life but the first
    deaf: bool = False  # ignore SIGTERM
    max_model_len: int = 4096
    orders: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of requests that bring none


@dataclass(frozen=True)
class Orders:
    say: str | None = None  # this text, then an end token
    split: bool = False  # a token for each byte
    per_event: int = 1  # tokens
    pause: float = 0.0  # seconds before each event
    hold: bool = False  # say nothing until aborted
    error_after: int | None = None  # events
    no_room: str = ""  # end as one that waited too long, with these words
    abort_after: int | None = None
    die_after: int | None = None
    company: int = 1  # choices that must be at the engine before it dies
    cut_after: int | None = None  # events; then the event stream ends, and the engine lives on
    refuse: str = ""  # name of an error of the tree
    cached: int = 0  # prompt tokens said to come from the cache
    lives: int = 1000  # of the engine, in which it holds or dies as ordered; later ones just answer
    refuse_again: str = ""  # as `refuse`, in the second life, once for each error


class FakeEngine(pb_grpc.EngineServicer):
    def __init__(self, settings: FakeSettings, start: Start, journal: Path, life: int) -> None:
        self._settings = settings
        self._start = start
        self._life = life  # 0 = the first
        self._refused_again: set[str] = set()
        self._cut = False
        self._tokenizer = TextTokenizer.from_directory(settings.model)
        self._began = time.monotonic()
        self._events: queue.SimpleQueue[pb.EventBatch] = queue.SimpleQueue()
        self._aborted: set[tuple[str, int]] = set()
        self._running: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        self._journal = journal
        self._tokens = 0

    def note(self, what: str, told: object) -> None:
        with self._lock, self._journal.open("a") as file:
            file.write(json.dumps({what: told}) + "\n")

    def Describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.EngineDescription:
        delay = self._start.later_delay if self._life else self._start.delay
        if time.monotonic() - self._began < delay:
            return pb.EngineDescription(
                state=pb.ENGINE_STATE_STARTING,
                detail="loading pretended weights",
                arena_bytes=4096,
                arena_registered_bytes=1024,
            )
        failure = self._start.later_fail if self._life else self._start.fail
        if failure:
            return pb.EngineDescription(state=pb.ENGINE_STATE_FAILED, detail=failure)
        return pb.EngineDescription(
            state=pb.ENGINE_STATE_READY,
            max_model_len_tokens=self._start.max_model_len,
            vocab_size=self._tokenizer.vocab_size,
            eos_token_ids=sorted(self._tokenizer.eos_ids),
            kv_mode=self._settings.kv_mode,
            dtype="float32",
            device="cpu",
            max_rows=self._settings.max_rows,
            max_waiting=self._settings.max_waiting,
            arena_bytes=4096,
            arena_registered_bytes=4096,
            arena_pages=7,
            hits_first=self._settings.hits_first,
            record_dtype=self._settings.record_dtype,
            index_dtype=self._settings.index_dtype,
        )

    def Submit(self, request: pb.SubmitRequest, context: grpc.ServicerContext) -> pb.SubmitReply:
        self.note("taken_by", self._settings.engine_index)
        self.note("submit", json_format.MessageToDict(request, preserving_proto_field_name=True))
        told = json.loads(request.cache_salt) if request.cache_salt[:1] == b"{" else self._start.orders
        orders = Orders(**told)
        if orders.refuse:
            raise getattr(errors, orders.refuse)("as ordered")
        again = orders.refuse_again
        if again and self._life == 1 and again not in self._refused_again:
            self._refused_again.add(again)
            raise getattr(errors, again)("as ordered")
        with self._lock:
            if (
                len(self._running) + len(request.choices)
                > self._settings.max_rows + self._settings.max_waiting
            ):
                raise errors.NoRoom("enough choices are waiting")
            keys = [(request.request_id, choice.index) for choice in request.choices]
            self._running.update(keys)
        for choice in request.choices:
            threading.Thread(target=self._answer, args=(request, choice, orders), daemon=True).start()
        return pb.SubmitReply()

    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortReply:
        self.note("abort", {"request_id": request.request_id, "choices": list(request.choices)})
        with self._lock:
            for request_id, choice in self._running:
                if request_id == request.request_id and (not request.choices or choice in request.choices):
                    self._aborted.add((request_id, choice))
        return pb.AbortReply()

    def Events(self, request: pb.EventsRequest, context: grpc.ServicerContext) -> Iterator[pb.EventBatch]:
        while context.is_active() and not self._cut:
            with contextlib.suppress(queue.Empty):
                yield self._events.get(timeout=0.1)

    def Stats(self, request: pb.EngineStatsRequest, context: grpc.ServicerContext) -> pb.EngineStats:
        layers = [
            pb.LayerStats(
                layer=layer,
                chosen_blocks=100,
                hits=75,
                misses=25,
                evictions=20,
                fetched_bytes=4096,
                resolve_ns=1_500_000_000,
            )
            for layer in range(2)
        ]
        with self._lock:
            return pb.EngineStats(
                requests_running=len(self._running),
                generation_tokens=self._tokens,
                prompt_tokens=11,
                steps=5,
                step_ns=2_000_000_000,
                steps_planned={"ahead": 4, "idle": 1},
                layers=layers,
                rows_total=self._settings.max_rows,
                rows_used=len(self._running),
                device_pages_total=10,
                device_pages_used=3,
                hot_slots_total=64,
                hot_slots_used=16,
                host_pages_held=3,
                sampled_blocks=40,
                curve=[pb.CurvePoint(size=0.5, misses=20), pb.CurvePoint(size=2, misses=5)],
            )

    def _answer(self, request: pb.SubmitRequest, choice: pb.Choice, orders: Orders) -> None:
        key = (request.request_id, choice.index)
        ids = self._ids(request, choice, orders)
        # Told before: only what is new is told. What is not the same answer so far is an error.
        sent = len(choice.generated_tokens)
        events, wrong = 0, list(choice.generated_tokens) != ids[:sent]
        obeys = self._life < orders.lives
        while True:
            time.sleep(orders.pause)
            while orders.hold and obeys and key not in self._aborted:
                time.sleep(0.01)
            batch = ids[sent : sent + orders.per_event]
            sent += len(batch)
            event = pb.TokenEvent(request_id=request.request_id, choice=choice.index)
            if events == 0:
                event.cached_prompt_tokens = orders.cached
                if request.sampling.prompt_logprobs and not choice.generated_tokens:
                    event.prompt.extend(_scored_prompt(request))
            if wrong:
                event.finish_reason, event.error = pb.FINISH_REASON_ERROR, "another answer so far"
            elif key in self._aborted:
                event.finish_reason = pb.FINISH_REASON_ABORT
            elif events == orders.error_after:
                event.finish_reason, event.error = pb.FINISH_REASON_ERROR, "as ordered"
            elif orders.no_room:
                event.finish_reason, event.error = pb.FINISH_REASON_NO_ROOM, orders.no_room
            elif events == orders.abort_after:
                event.finish_reason = pb.FINISH_REASON_ABORT
            elif events == orders.die_after and obeys:
                while len(self._running) < orders.company:
                    time.sleep(0.01)
                time.sleep(orders.pause)  # the last one is told that it was taken
                os.kill(os.getpid(), signal.SIGKILL)
            elif events == orders.cut_after and obeys:
                self._cut = True
                return
            else:
                event.tokens.extend(_token(request, token) for token in batch)
                if sent >= len(ids):
                    ends = {*request.stop_token_ids, *(() if request.ignore_eos else self._tokenizer.eos_ids)}
                    stopped = bool(ids) and ids[-1] in ends
                    event.finish_reason = pb.FINISH_REASON_STOP if stopped else pb.FINISH_REASON_LENGTH
            events += 1
            with self._lock:
                self._tokens += len(event.tokens)
                if event.finish_reason:
                    self._running.discard(key)
            self._events.put(pb.EventBatch(events=[event]))
            if event.finish_reason:
                return

    def _ids(self, request: pb.SubmitRequest, choice: pb.Choice, orders: Orders) -> list[int]:
        if orders.say is None:
            seed = choice.seed if request.sampling.temperature else 0
            digits = [_digit(seed, place) for place in range(request.max_tokens)]
            ids = [self._tokenizer.encode(str(digit), add_special_tokens=False)[0] for digit in digits]
        else:
            parts = [bytes([byte]) for byte in orders.say.encode()] if orders.split else None
            ids = (
                self._tokenizer.encode(orders.say, add_special_tokens=False)
                if parts is None
                else [self._of_bytes(part) for part in parts]
            )
            ids.append(min(self._tokenizer.eos_ids))
        ends = {*request.stop_token_ids, *(() if request.ignore_eos else self._tokenizer.eos_ids)}
        for place, token in enumerate(ids):
            if token in ends:
                ids = ids[: place + 1]
                break
        return ids[: request.max_tokens]

    def _of_bytes(self, part: bytes) -> int:
        return next(i for i in range(self._tokenizer.vocab_size) if self._tokenizer.bytes_of(i) == part)


def _digit(seed: int, place: int) -> int:
    return hashlib.blake2b(f"{seed}.{place}".encode()).digest()[0] % 10


def _token(request: pb.SubmitRequest, token: int) -> pb.Token:
    if not request.sampling.logprobs:
        return pb.Token(id=token)
    count = request.sampling.top_logprobs
    top = [pb.TopLogprob(id=token + place, logprob=-0.5 - place) for place in range(count)]
    if count > 1:
        top[-1].logprob = float("-inf")
    return pb.Token(id=token, logprob=-0.5, top=top)


def _scored_prompt(request: pb.SubmitRequest) -> list[pb.Token]:
    first, *rest = request.prompt_tokens
    return [pb.Token(id=first), *(_token(request, token) for token in rest)]


def main() -> None:
    start = Start(**json.loads(os.environ.get("FAKE_ENGINE", "{}")))
    if start.exit is not None:
        print("loading", "error: the pretended model is broken", sep="\n", file=sys.stderr)
        raise SystemExit(start.exit)
    settings = FakeSettings.from_command_line(sys.argv[1:], program="fake_engine")
    journal = Path(os.environ["FAKE_ENGINE_JOURNAL"])
    lines = map(json.loads, journal.read_text().splitlines()) if journal.exists() else ()
    lives = sum(line.get("start", {}).get("engine") == settings.engine_index for line in lines)
    engine = FakeEngine(settings, start, journal, lives)
    engine.note("start", {"pid": os.getpid(), "engine": settings.engine_index, **dataclasses.asdict(start)})
    if start.second_fails and lives == 1:
        raise SystemExit(3)
    server = grpc.server(ThreadPoolExecutor(16), options=SERVER_OPTIONS, interceptors=[ErrorInterceptor()])
    pb_grpc.add_EngineServicer_to_server(engine, server)
    server.add_insecure_port(f"unix:{settings.engine_socket}")
    server.start()
    print("event=fake_engine_ready", file=sys.stderr)
    asked = threading.Event()
    signal.signal(signal.SIGTERM, (lambda *_: None) if start.deaf else (lambda *_: asked.set()))
    asked.wait()
    server.stop(grace=None)
    engine.note("end", os.getpid())
    os._exit(0)


if __name__ == "__main__":
    main()

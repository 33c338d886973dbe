"""`python -m services.decoder.engine`: one engine process; the wiring, and nothing else.

Started by the front. It answers Describe on its socket from the first moment, and ends with status 2 and
one line on standard error if the start fails.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import grpc
from hotset.v1 import engine_pb2_grpc as pb_grpc

from services.contract.base_settings import exit_with
from services.contract.channel import SERVER_OPTIONS
from services.contract.errors import SetupError
from services.contract.log import configure_logging
from services.contract.rpc_errors import ErrorInterceptor
from services.contract.wire_security import WireSecurity
from services.decoder.engine.own_device import keep_to
from services.decoder.engine.remote_link import open_session, remote_arena
from services.decoder.engine.remote_session import RemoteSession
from services.decoder.engine.servicer import EngineServicer, Served
from services.decoder.engine.settings import EngineSettings
from services.decoder.engine.start import at_once, fault_in_early
from services.decoder.engine.store_session import StoreSession

_log = logging.getLogger(__name__)
_RPC_THREADS = 8  # one is the event stream's for good
_SIGNAL_SECONDS = 0.2  # a signal that the system gave to another thread is handled when this one wakes
_STEP_SECONDS = 2.0  # how long the step in progress may take to end before it is left behind
_REASON_SECONDS = 1.0  # how long a failed start stays reachable, so that the front can ask why
_SWITCH_SECONDS = 0.0005  # how long the loop waits for a thread that takes a request; Python says 5 ms


def start_server(socket: Path, servicer: EngineServicer) -> grpc.Server:
    """Listen on the Unix socket."""
    server = grpc.server(
        ThreadPoolExecutor(_RPC_THREADS), options=SERVER_OPTIONS, interceptors=[ErrorInterceptor()]
    )
    pb_grpc.add_EngineServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    return server


def load(
    settings: EngineSettings, store: StoreSession, servicer: EngineServicer, called_off: threading.Event
) -> Served:
    """Everything between the flags and the first step; given up soon after `called_off` is set.

    Raises:
        SetupError: the checkpoint, the store or the machine does not allow it.
        Unavailable: called off.
    """
    servicer.progress("importing torch and transformers")
    asked = settings.device
    settings = settings.model_copy(update={"device": keep_to(asked, os.environ)})
    import torch

    if settings.device != "cpu" and torch.cuda.is_available():
        fault_in_early(store, settings.store_wait_seconds, called_off)
    from transformers.utils import logging as transformers_logging

    from services.decoder.engine.assembly import (
        assemble,
        capacity_book,
        check_access,
        check_device,
        dense_ops,
        limits_of,
        page_hasher,
    )
    from services.decoder.engine.host_allocator import keep_freed_memory
    from services.decoder.engine.lane_slots import lane_slots_of
    from services.decoder.engine.loads_beside import loads_beside
    from services.decoder.engine.loop import Loop
    from services.decoder.engine.memory_plan import (
        MemoryPlan,
        device_room,
        kv_fingerprint,
        kv_planes,
        kv_shape,
    )
    from services.decoder.engine.model_settings import settings_for
    from services.decoder.engine.scheduler import Scheduler
    from services.decoder.kv.arena_map import ArenaMap
    from services.decoder.kv.device_pages import DevicePages
    from services.decoder.kv.remote_arena import RemoteArena
    from services.decoder.models.causal_lm import CausalLM, resolve_device, resolve_dtype
    from services.decoder.models.spec import ModelSpec

    keep_freed_memory()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = resolve_device(settings.device)
    check_device(device, asked)
    check_access(settings, device)
    dtype = resolve_dtype(settings.dtype, device)
    spec = ModelSpec.read(settings.model)
    settings = settings_for(settings, spec)
    shape = kv_shape(settings, spec, dtype)
    planes = kv_planes(settings, shape)
    servicer.progress(f"attaching to kvstore at {settings.kvstore}")
    layout = store.attach(kv_fingerprint(spec, shape), shape.page_tokens, planes, settings.store_wait_seconds)
    servicer.progress(f"loading weights from {settings.model}")

    def map_arena() -> ArenaMap:
        def progress(registered: int) -> None:
            servicer.arena(registered, layout.arena_bytes)

        return ArenaMap(store.arena_path, layout, shape, device, progress=progress, called_off=called_off)

    def load_weights() -> CausalLM:
        began = time.monotonic()
        model = CausalLM(spec, dtype, device, dense=dense_ops(device))
        _log.info("weights_loaded bytes=%d seconds=%.2f", model.weight_bytes, time.monotonic() - began)
        return model

    arena: ArenaMap | RemoteArena
    if isinstance(store, RemoteSession):
        arena, model = remote_arena(store, settings, layout), load_weights()
    else:
        arena, model = at_once(map_arena, load_weights)
    room, lane_slots = device_room(settings, device), lane_slots_of(settings, device)
    plan = MemoryPlan.derive(settings, spec, shape, layout, model.weight_bytes, device, room, lane_slots)
    servicer.progress("allocating the hot buffer and its tables")
    runner = assemble(plan, model, arena, device)
    device_pages = DevicePages(plan.device_pages)
    hasher = page_hasher(plan, kv_fingerprint(spec, shape))
    scheduler = Scheduler(
        limits_of(plan),
        store,
        device_pages,
        hasher,
        capacity_book(plan),
        share_device_pages=settings.share_device_pages,
        loads_beside=loads_beside(device),
    )
    _log.info("memory_plan model=%s device=%s\n%s", settings.model.name, device, plan.table())
    if settings.hits_first:
        _log.warning("hits_first answers=%r", "their last bits, so now and then a token, depend on residency")
    if plan.shape.record_coded:
        _log.warning(
            "records_not_exact record_dtype=float8 record_bytes=%d: answers differ from those of "
            "--record-dtype auto",
            plan.shape.block_bytes,
        )
    return Served(
        spec=spec,
        plan=plan,
        loop=Loop(
            scheduler,
            runner,
            servicer.publish,
            queue_seconds=settings.queue_seconds,
            store_seconds=settings.store_seconds if settings.store_access == "remote" else 0.0,
            seals_first=settings.prefill_only,
        ),
        runner=runner,
        device_pages=device_pages,
        store=store,
        device=asked if device.type in asked else str(device),
    )


def main() -> NoReturn:
    """Serve until SIGTERM, and leave the process."""
    try:
        settings = EngineSettings.from_command_line(sys.argv[1:], program="services.decoder.engine")
        security = WireSecurity.read(settings.wire_dir)
    except SetupError as error:
        exit_with(error)
    configure_logging(settings.log_level)
    sys.setswitchinterval(_SWITCH_SECONDS)
    servicer = EngineServicer()
    server = start_server(settings.engine_socket, servicer)
    store = open_session(settings, security)
    asked_to_end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked_to_end.set())
    failure: list[SetupError] = []
    writing = threading.Event()
    thread = threading.Thread(
        target=serve,
        args=(settings, store, servicer, asked_to_end, failure, writing),
        name="loop",
        daemon=True,
    )
    thread.start()
    while not asked_to_end.wait(_SIGNAL_SECONDS):
        pass
    try:
        if failure:
            servicer.fail(failure[0])
            threading.Event().wait(_REASON_SECONDS)
            close(store, writing)
            server.stop(grace=None)
            exit_with(failure[0])
        servicer.stop()
        thread.join(timeout=_STEP_SECONDS)
        close(store, writing)
        server.stop(grace=0.2).wait()
    finally:
        # Python would take torch and CUDA down piece by piece, which takes seconds, and aborts beside a step
        # or a load that still runs. Nothing is left that the system does not take back by itself.
        logging.shutdown()
        os._exit(2 if failure else 0)


def close(store: StoreSession, writing: threading.Event) -> None:
    """Give the session's pages back, unless something may still write them.

    Then they are left to the session's end: a store gives a mapped client's pages away when its process is
    gone, which is in a moment, and a remote one's when its lease is over.
    """
    if writing.is_set():
        _log.warning("session_left_behind reason=%r", "a step has not ended")
    else:
        store.close()


def serve(
    settings: EngineSettings,
    store: StoreSession,
    servicer: EngineServicer,
    ended: threading.Event,
    failure: list[SetupError],
    writing: threading.Event,
) -> None:
    """The loop's thread: load, then step until told to stop; a SetupError goes into `failure`.

    `writing` is set while a step may write pages.
    """
    try:
        served = load(settings, store, servicer, ended)
        writing.set()
        gc.collect()
        gc.freeze()  # no step need wait for a collection among what stays until the end
        servicer.serve(served)
        _log.info("engine_ready socket=%s pid=%d", settings.engine_socket, os.getpid())
        try:
            served.loop.run()
        finally:
            served.runner.wait()  # a step launched ahead, or one that failed, may still write its pages
            writing.clear()
    except SetupError as error:
        failure.append(error)
    except Exception as error:  # noqa: BLE001  # told to the front, with the traceback in the log
        if ended.is_set():
            _log.info("start_abandoned error=%s", error)
            return
        _log.exception("engine_failed")
        failure.append(SetupError(f"{type(error).__name__}: {error}"))
    finally:
        ended.set()


if __name__ == "__main__":
    main()

"""`hotset serve`: model, kvstore, decoder, a line to try it with, and a clean end.

Knows the order of things and the services' command lines; how children are kept is family.py. Where a store
is named, this process becomes the decoder.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from services.command.doctor.facts import DECODER_PACKAGES, absent
from services.command.serve.arena_directory import TMPFS, ArenaDirectory
from services.command.serve.child import Child
from services.command.serve.console import Console
from services.command.serve.family import Failure, Family, Stopped
from services.command.serve.options import Options
from services.command.serve.probe import is_ready, port_is_free, start_told
from services.contract.errors import SetupError

MODEL_SECONDS = 3600.0  # a download
KVSTORE_SECONDS = 120.0
DECODER_SECONDS = 900.0  # a large checkpoint from a slow disk
_READY = re.compile(r"kvstore ready grpc=(\S+)")
_PYTHON = (sys.executable, "-m")


def run(arguments: Sequence[str]) -> int:
    """Exit status: 0 after a clean stop, 1 when something failed.

    Raises:
        SetupError: the arguments, the environment or the file are not what they should be.
    """
    options = Options.read(arguments)
    if lacking := absent(DECODER_PACKAGES):
        raise SetupError(f"serving needs {', '.join(lacking)}: pip install 'hotset[decoder]' torch==2.13.0")
    if not options.own_store:
        become_decoder(options)
    console = Console()
    try:
        if not port_is_free(options.host, options.port):
            raise Failure(
                f"port {options.port} of {options.host} is busy; stop what listens there, or choose another: "
                f"hotset serve --port {options.port + 1} (make run PORT={options.port + 1})"
            )
        with ArenaDirectory() as arena, Family(console) as family:
            serve(family, console, options, arena.path)
    except Stopped:
        console.say("stopped")
        return 0
    except Failure as failure:
        print(f"error: {failure}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error}; hotset runs on Linux and needs {TMPFS} for its arena", file=sys.stderr)
    return 1


def become_decoder(options: Options) -> NoReturn:
    """Over a store that runs elsewhere; the bundled model is made first where none is named."""
    flags = options.decoder_args
    if not options.model:
        making = subprocess.run(
            [*_PYTHON, "services.decoder.models.bundled"], stdout=subprocess.PIPE, check=False
        )
        if making.returncode:
            raise SystemExit(making.returncode)
        flags = ("--model", making.stdout.decode().strip(), *flags)
    os.execv(sys.executable, [*_PYTHON, "services.decoder", *flags])


def serve(family: Family, console: Console, options: Options, arena: Path) -> None:
    """Start everything, say that it is there, and wait.

    Raises:
        Failure: a service ended, or did not get ready.
        Stopped: a signal came.
    """
    start = time.monotonic()
    model = options.model
    if not model:
        console.say("looking for the default model")
        model = family.run("model", [*_PYTHON, "services.decoder.models.bundled"], MODEL_SECONDS)
    console.say("starting kvstore")
    command = [*_PYTHON, "services.kvstore", "--listen", "127.0.0.1:0", "--metrics-port", "0"]
    kvstore = family.start("kvstore", [*command, "--arena-dir", str(arena), *options.store_args])
    family.wait("kvstore", lambda: _address(kvstore) is not None, KVSTORE_SECONDS)

    console.say(f"starting the decoder with {model}")
    command = [*_PYTHON, "services.decoder", *options.decoder_args, "--model", model]
    family.start("decoder", [*command, "--kvstore", _address(kvstore) or ""])
    host, port = options.reachable_host, options.port
    ready, told = (lambda: is_ready(host, port)), (lambda: start_told(host, port))
    family.wait("the decoder", ready, DECODER_SECONDS, told)

    url = f"http://{host}:{port}"
    console.say(f"ready after {time.monotonic() - start:.0f} s: {url}  (Ctrl-C stops)")
    console.line(_try_it(url, options.served_name or Path(model).resolve().name, options.with_keys))
    family.wait("the end", lambda: False, float("inf"))


def _address(kvstore: Child) -> str | None:
    """Where kvstore listens, once it has said so."""
    found = [match[1] for line in kvstore.tail if (match := _READY.search(line))]
    return found[0] if found else None


def _try_it(url: str, model: str, with_keys: bool) -> str:
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": model, "messages": [question], "temperature": 0})
    key = "-H 'authorization: Bearer KEY' " if with_keys else ""
    return f"\n  curl {url}/v1/chat/completions {key}-H 'content-type: application/json' -d '{body}'\n"

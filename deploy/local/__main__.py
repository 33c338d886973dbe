"""`make run`, after the installation: model, kvstore, decoder, a line to try it with, and a clean end.

Knows the order of things and the services' command lines; how children are kept is family.py.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

from deploy.local.arena_directory import TMPFS, ArenaDirectory
from deploy.local.child import Child
from deploy.local.console import Console
from deploy.local.family import Failure, Family, Stopped
from deploy.local.options import Options
from deploy.local.probe import is_ready, model_name, port_is_free

MODEL_SECONDS = 3600.0  # a download
KVSTORE_SECONDS = 120.0
DECODER_SECONDS = 900.0  # a large checkpoint from a slow disk
_READY = re.compile(r"kvstore ready grpc=(\S+)")


def main() -> int:
    """Exit status: 0 after a clean stop, 1 when something failed."""
    console = Console()
    try:
        options = Options.read(os.environ)
        if not port_is_free(options.host, options.port):
            raise Failure(
                f"port {options.port} of {options.host} is busy; stop what listens there, or choose another: "
                f"make run PORT={options.port + 1}"
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


def serve(family: Family, console: Console, options: Options, arena: Path) -> None:
    """Start everything, say that it is there, and wait.

    Raises:
        Failure: a service ended, or did not get ready.
        Stopped: a signal came.
    """
    start = time.monotonic()
    python = [sys.executable, "-m"]
    model = options.model
    if not model:
        console.say("looking for the default model")
        model = family.run("model", [*python, "services.decoder.models.bundled"], MODEL_SECONDS)
    console.say("starting kvstore")
    command = [*python, "services.kvstore", "--listen", "127.0.0.1:0", "--metrics-port", "0"]
    kvstore = family.start("kvstore", [*command, "--arena-dir", str(arena), *options.kvstore_args])
    family.wait("kvstore", lambda: _address(kvstore) is not None, KVSTORE_SECONDS)

    console.say(f"starting the decoder with {model}")
    command = [*python, "services.decoder", "--model", model, "--kvstore", _address(kvstore) or ""]
    family.start("decoder", [*command, "--port", str(options.port), *options.decoder_args])
    host = options.reachable_host
    family.wait("the decoder", lambda: is_ready(host, options.port), DECODER_SECONDS)

    url = f"http://{host}:{options.port}"
    console.say(f"ready after {time.monotonic() - start:.0f} s: {url}  (Ctrl-C stops)")
    console.line(_try_it(url, model_name(host, options.port, Path(model).name)))
    family.wait("the end", lambda: False, float("inf"))


def _address(kvstore: Child) -> str | None:
    """Where kvstore listens, once it has said so."""
    found = [match[1] for line in kvstore.tail if (match := _READY.search(line))]
    return found[0] if found else None


def _try_it(url: str, model: str) -> str:
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": model, "messages": [question], "temperature": 0})
    return f"\n  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n"


if __name__ == "__main__":
    sys.exit(main())

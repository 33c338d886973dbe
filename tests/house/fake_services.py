"""Tiny services for tests of the launcher: they start at once, say what they got, and misbehave on demand.

The launcher starts them as `python -m services.*` from the directory that `write_fakes` filled. They know
nothing of KV or tokens.
"""

from __future__ import annotations

from pathlib import Path

KVSTORE = """
import argparse, os, pathlib, signal, sys, threading
parser = argparse.ArgumentParser()
parser.add_argument("--arena-dir", type=pathlib.Path)
options, others = parser.parse_known_args()
print("kvstore got", *others)
if os.environ.get("FAKE_KVSTORE") == "failure":
    sys.exit("error: no tmpfs here")
(options.arena_dir / "arena").write_bytes(b"kv")
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
print(f"kvstore ready grpc=127.0.0.1:7 metrics=127.0.0.1:8 arena={options.arena_dir}/arena", flush=True)
stop.wait()
print("kvstore ends")
"""

DECODER = """
import argparse, http.server, os, signal, subprocess, sys, threading
parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
options, others = parser.parse_known_args()
print("decoder got", *others)
fake = os.environ.get("FAKE_DECODER")
if fake == "failure":
    sys.exit("error: unsupported architecture")
if fake == "children":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("grandchild", child.pid)

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            os._exit(3)
        self.send_response(200)
        self.end_headers()
        if self.path == "/health":
            self.wfile.write(b'{"detail": "loading weights"}')

    def log_message(self, *_):
        pass

server = http.server.HTTPServer(("127.0.0.1", options.port), Answers)
if fake == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
server.serve_forever()
print("decoder ends")
"""

BUNDLED = """
import sys
sys.stderr.write("default model: fetching\\n")
print("/a/model")
"""


def write_fakes(root: Path) -> None:
    """Put the three programs below `root`, under the names that the launcher starts."""
    programs = {"kvstore": KVSTORE, "decoder": DECODER, "decoder/models/bundled": BUNDLED}
    for place, text in programs.items():
        directory = root / "services" / place
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "__main__.py").write_text(text)
    for directory in (root / "services", *(root / "services").rglob("*")):
        if directory.is_dir():
            (directory / "__init__.py").touch()

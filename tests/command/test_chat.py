"""`hotset chat` and `hotset bench` against a live front: conversations, interrupts, refusals, figures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from services.command.__main__ import main
from services.command.bench.measure import Prompts
from services.command.bench.streams import ask
from services.command.chat import Conversation, printable
from services.command.server import Server
from services.contract.errors import InvalidRequest, Unavailable
from tests.front.live import ROOT, LiveFront, live_front, until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def paris(default_model: Path) -> Iterator[LiveFront]:
    orders = {"say": "It is Paris.\x1b[2J Really.", "per_event": 1}
    with live_front(default_model, "--api-keys=right", start={"orders": orders}) as front:
        yield front


def chat(
    *flags: str, said: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.command", "chat", *flags],
        input=said,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | (environment or {}),
        timeout=120,
    )


def test_a_conversation(paris: LiveFront) -> None:
    said = "Where is the tower?\n\n/help\n/what is it\nAnd now?\n/new\nAgain?\n/exit\nnever read\n"
    done = chat(
        "--url", paris.url, "--system", "Be brief.", said=said, environment={"HOTSET_API_KEY": "right"}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("It is Paris.[2J Really.") == 3, "the escape is left out, the rest is not"
    assert "there is no /what" in done.stdout
    assert done.stdout.count("stop the answer") == 2
    asked = [len(submitted["prompt_tokens"]) for submitted in paris.noted("submit")[-3:]]
    assert asked[0] < asked[1] > asked[2], (
        "the second question brings the first and its answer along, the third not"
    )
    assert abs(asked[0] - asked[2]) < 10


def test_the_end_of_the_input_ends_it(paris: LiveFront) -> None:
    assert chat("--url", paris.url, "--key", "right", said="").returncode == 0


def nobody() -> str:
    """An address at which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize("command", ["chat", "bench"])
def test_wrong_addresses_and_keys(command: str, paris: LiveFront, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*flags: str) -> tuple[int, str]:
        status = main([command, *flags])
        told = capsys.readouterr()
        assert told.out == ""
        return status, told.err

    status, told = refused("--url", nobody())
    assert (status, "nobody listens at" in told, "hotset serve" in told) == (1, True, True)
    status, told = refused("--url", "http://no-such-host.invalid:8000")
    assert (status, "no-such-host.invalid is not known" in told) == (1, True)
    for wrong in ("ftp://127.0.0.1", "http://127.0.0.1:http", "http://", "http://127.0.0.1/elsewhere"):
        status, told = refused("--url", wrong)
        assert (status, told.startswith("error: ")) == (2, True), wrong
    for key in ((), ("--key", "wrong")):
        status, told = refused("--url", paris.url, *key)
        assert (status, "wants a key that it knows: --key" in told) == (1, True)


def test_a_listener_that_is_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        answering = subprocess.Popen(
            [sys.executable, "-c", "import socket, sys; s = socket.socket(fileno=int(sys.argv[1]));"
             "c, _ = s.accept(); c.recv(1000); c.sendall(b'hello\\n'); c.close()", str(listener.fileno())],
            pass_fds=[listener.fileno()],
        )  # fmt: skip
        assert main(["chat", "--url", f"127.0.0.1:{port}"]) == 1
        assert answering.wait(60) == 0
    assert "does not answer as a server should" in capsys.readouterr().err


def test_ctrl_c_stops_an_answer_and_no_more(default_model: Path) -> None:
    """In a terminal of its own, as a person would press it."""
    orders = {"say": "word " * 3000, "per_event": 1, "pause": 0.05}
    with live_front(default_model, start={"orders": orders}) as slow:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "services.command", "chat", "--url", slow.url, "--max-tokens", "3500"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=ROOT,
            start_new_session=True,
        )
        os.close(theirs)
        screen = Screen(ours)
        try:
            screen.until("> ")
            os.write(ours, b"Talk.\n")
            screen.until("word word")
            process.send_signal(signal.SIGINT)
            screen.until("(stopped)")
            until(lambda: slow.noted("abort"), "the engine to hear of it")
            screen.until("> ")
            process.send_signal(signal.SIGINT)
            screen.until("/exit ends")
            os.write(ours, b"/exit\n")
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
            os.close(ours)
        assert "Traceback" not in screen.seen


class Screen:
    """What a terminal was told; each wait goes on behind the last."""

    def __init__(self, descriptor: int) -> None:
        self.seen = ""
        self._descriptor, self._behind = descriptor, 0
        os.set_blocking(descriptor, False)

    def until(self, wanted: str) -> None:
        def came() -> bool:
            with contextlib.suppress(BlockingIOError):
                self.seen += os.read(self._descriptor, 65536).decode(errors="replace")
            return wanted in self.seen[self._behind :]

        until(came, wanted, 120)
        self._behind = self.seen.index(wanted, self._behind) + len(wanted)


@pytest.mark.slow
def test_what_was_refused_is_not_kept(default_model: Path) -> None:
    with live_front(default_model, start={"max_model_len": 100, "orders": {"say": "Yes."}}) as front:
        talk = Conversation(Server.at(front.url), "fake", 20, 0.0)
        pieces: list[str] = []
        assert talk.ask("Well?", pieces.append)
        with pytest.raises(InvalidRequest, match="tokens"):
            talk.ask("long " * 200, pieces.append)
        assert [message["content"] for message in talk.messages] == ["Well?", "Yes."]
        front.stop()
        with pytest.raises(Unavailable, match="nobody listens"):
            talk.ask("Still there?", pieces.append)
        assert len(talk.messages) == 2


@pytest.mark.slow
def test_a_server_that_dies_says_so(default_model: Path) -> None:
    with live_front(default_model, start={"orders": {"say": "word " * 400, "pause": 0.05}}) as front:
        talk = Conversation(Server.at(front.url), "fake", 500, 0.0)

        def die(_: str) -> None:
            front.process.kill()

        with pytest.raises(Unavailable):
            talk.ask("Well?", die)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("a\x1b[31mb", "a[31mb"),
        ("a\tb\nc", "a\tb\nc"),
        ("\x07\x9b1m\u202e", "1m"),
        ("né 東 🙂", "né 東 🙂"),
    ],
)
def test_no_answer_commands_a_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_measured_round(default_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    orders = {"pause": 0.05}
    with live_front(default_model, start={"orders": orders}) as front:
        path = tmp_path / "figures.json"
        flags = ["--streams", "1", "3", "--prompt-tokens", "40", "--answer-tokens", "12", "--seed", "7"]
        assert main(["bench", "--url", front.url, *flags, "--json", str(path)]) == 0
        table = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in table[-2:]] == ["1", "3"]
        submitted = front.noted("submit")
        assert [len(each["prompt_tokens"]) for each in submitted] == [40] * 4
        assert len({tuple(each["prompt_tokens"][:8]) for each in submitted}) == 4, (
            "no prompt begins as another"
        )
        assert main(["bench", "--url", front.url, "--streams", "1", "--answer-tokens", "5000"]) == 1
        assert "lower --prompt-tokens or --answer-tokens" in capsys.readouterr().err
    told = json.loads(path.read_text())
    assert (told["model"], told["seed"], [one["streams"] for one in told["rounds"]]) == ("fake", 7, [1, 3])
    for one in told["rounds"]:
        # The engine waits 50 ms before each token. Client and server time the same thing; a busy machine may
        # keep one of them waiting, but not for half of it all.
        assert one["tpot_ms"] > 25
        assert 0.5 < one["server_tpot_ms"] / one["tpot_ms"] < 2
        assert 0 < one["ttft_median_ms"] <= one["ttft_worst_ms"]
        assert one["tokens_per_s"] > 0
        assert one["hit_rate"] is None, "the fake engine's counters stand still"


def test_a_round_that_the_server_refuses(paris: LiveFront) -> None:
    known, unknown = Server.at(paris.url, "right"), Server.at(paris.url, "wrong")
    prompts = Prompts(known, "fake", 0).take(10, 2)
    with pytest.raises(InvalidRequest, match="0 pieces instead of 8: that API key is not accepted"):
        asyncio.run(ask(unknown, prompts, 8, "fake"))


@pytest.mark.parametrize("flags", [["--streams", "0"], ["--answer-tokens", "1"], ["--prompt-tokens", "many"]])
def test_refused_flags(flags: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *flags])
    assert ended.value.code == 2
    assert flags[0] in capsys.readouterr().err

"""`hotset chat`: a conversation with a running server, in the terminal.

Knows the chat route and a person's keys: Ctrl-C stops an answer, Ctrl-D or /exit ends.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from services.command.server import Server, add_server_flags
from services.contract.errors import HotsetError

_HELP = """  /new     forget what was said
  /help    these lines
  /exit    end, as Ctrl-D does
  Ctrl-C   stop the answer that is being given"""


@dataclass(slots=True)
class Conversation:
    """What was said so far."""

    server: Server
    model: str
    max_tokens: int
    temperature: float
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str, show: Callable[[str], None]) -> bool:
        """Say `text` and show the answer piece by piece; False if a Ctrl-C cut it short.

        What was shown of an answer stays in the conversation. A question that was refused does not.

        Raises:
            HotsetError: the server refuses, or is gone.
        """
        asked = {"role": "user", "content": text}
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": [*system, *self.messages, asked],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        pieces: list[str] = []
        whole = False
        try:
            with closing(self.server.stream("/v1/chat/completions", body)) as events:
                for event in events:
                    for choice in event["choices"]:
                        piece = str(choice["delta"].get("content") or "")
                        pieces.append(piece)
                        show(piece)
            whole = True
        except KeyboardInterrupt:
            pass
        if whole or pieces:
            self.messages += [asked, {"role": "assistant", "content": "".join(pieces)}]
        return whole


def run(arguments: Sequence[str]) -> int:
    """Exit status: 0 ended by the person, 1 the server cannot be talked with.

    Raises:
        HotsetError: it does not answer at the start, or the address or the key is wrong.
    """
    parser = argparse.ArgumentParser(prog="hotset chat", description="Talk with a running server.", epilog="")
    add_server_flags(parser)
    parser.add_argument("--system", default="", help="instructions that come before everything")
    parser.add_argument("--max-tokens", type=int, default=512, help="of an answer (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 = always the likeliest token")
    asked = parser.parse_args(arguments)
    server = Server.at(asked.url, asked.key)
    model = str(server.model()["id"])
    talk = Conversation(server, model, asked.max_tokens, asked.temperature, asked.system)
    if sys.stdin.isatty():
        import readline  # noqa: F401  # gives `input` a line to edit, and its history
    print(f"{model} at {server.url}. /help says what else there is; /exit ends.")
    while True:
        try:
            text = input("\n> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print("\n(/exit ends)")
            continue
        if text == "/exit":
            return 0
        if text.startswith("/"):
            _order(talk, text)
        elif text:
            _answer(talk, text)


def _order(talk: Conversation, text: str) -> None:
    if text == "/new":
        talk.messages.clear()
        print("(a new conversation)")
    elif text == "/help":
        print(_HELP)
    else:
        print(f"there is no {text.split()[0]}; these there are:\n{_HELP}")


def _answer(talk: Conversation, text: str) -> None:
    def show(piece: str) -> None:
        sys.stdout.write(printable(piece))
        sys.stdout.flush()

    try:
        print("" if talk.ask(text, show) else "\n(stopped)")
    except HotsetError as error:
        print(f"\nerror: {error}", file=sys.stderr)


def printable(text: str) -> str:
    """`text` without control characters: a model must not be able to command a terminal."""
    return "".join(letter for letter in text if letter in "\n\t" or letter.isprintable())

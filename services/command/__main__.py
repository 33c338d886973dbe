"""`hotset COMMAND ...`: finds the command and hands it its arguments. Knows their names, not what they do.

A command is imported when it is asked for, so that `hotset store` needs no extra and `hotset --help` is
there at once.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version

from services.contract.errors import HotsetError, SetupError

Command = Callable[[Sequence[str]], int]

REFUSED = 2
"""Exit status of what was asked wrongly; a command's own failures are 1."""


def _serve(arguments: Sequence[str]) -> int:
    from services.command.serve.launch import run

    return run(arguments)


def _store(arguments: Sequence[str]) -> int:
    from services.command.store import run

    return run(arguments)


def _chat(arguments: Sequence[str]) -> int:
    from services.command.chat import run

    return run(arguments)


def _bench(arguments: Sequence[str]) -> int:
    from services.command.bench.command import run

    return run(arguments)


def _plan(arguments: Sequence[str]) -> int:
    from services.command.plan.command import run

    return run(arguments)


def _doctor(arguments: Sequence[str]) -> int:
    from services.command.doctor.command import run

    return run(arguments)


COMMANDS: Mapping[str, tuple[str, Command]] = {
    "serve": ("serve a model: the decoder, and a store of its own unless --kvstore names one", _serve),
    "store": ("run kvstore alone, for decoders that name it", _store),
    "chat": ("talk with a running server, in the terminal", _chat),
    "bench": ("measure a running server: time to first token, time per token, hit rate", _bench),
    "plan": ("what fits a GPU and its host, and what a token will cost", _plan),
    "doctor": ("look at this machine, and say what to type where something is missing", _doctor),
}


def usage() -> str:
    """The commands, a line each."""
    lines = [f"  {name:<8}{text}" for name, (text, _) in COMMANDS.items()]
    return "\n".join(
        ["usage: hotset COMMAND [flags]", "", *lines, "", "hotset COMMAND --help lists its flags."]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 it failed, 2 asked wrongly, 130 interrupted.

    Args:
        arguments: those of the process if None.
    """
    asked = list(sys.argv[1:] if arguments is None else arguments)
    first = asked[0] if asked else "--help"
    if first in ("--help", "-h", "help"):
        sys.stdout.write(usage() + "\n")
        return 0 if asked else REFUSED
    if first in ("--version", "-V"):
        sys.stdout.write(f"hotset {version('hotset')}\n")
        return 0
    if first not in COMMANDS:
        near = difflib.get_close_matches(first, COMMANDS, n=1)
        hint = f"did you mean `hotset {near[0]}`?" if near else "see `hotset --help`"
        sys.stderr.write(f"error: there is no command {first!r}; {hint}\n")
        return REFUSED
    try:
        return COMMANDS[first][1](asked[1:])
    except HotsetError as error:
        sys.stderr.write(f"error: {error}\n")
        return REFUSED if isinstance(error, SetupError) else 1
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"error: {error}; pip install 'hotset[decoder]' torch==2.13.0, or ask `hotset doctor`\n"
        )
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1  # nobody reads any more: `hotset plan ... | head`


if __name__ == "__main__":
    sys.exit(main())

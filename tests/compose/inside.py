"""`python -m tests.compose.inside PLACE ...`: the test proper, in namespaces that end with it.

Its parent is process 1 of these: when that ends, however it comes about, the kernel ends whatever is left.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.compose import checks
from tests.compose.commands import CommandFailed, run
from tests.compose.daemon import docker, environment
from tests.compose.images import build_stand_ins
from tests.compose.leftovers import namespaces_of
from tests.compose.say import say
from tests.compose.stack import Stack
from tests.compose.supplies import Supplies

_DATA_BYTES = 6 * 2**30  # layers of both images and of what they are built in: 4 GB


def main() -> int:
    """Exit status: 0 all is well, 1 it is not."""
    parser = argparse.ArgumentParser(prog="python -m tests.compose.inside", description=__doc__)
    parser.add_argument("--place", type=Path, required=True, help="the test's own directory")
    parser.add_argument("--torch", required=True, help="what pip is given for torch")
    for name in Supplies.__dataclass_fields__:
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    supplies = Supplies(*(getattr(options, name) for name in Supplies.__dataclass_fields__))
    env = environment(supplies.engine, options.place)
    stack = Stack(env, Path(sys.executable).with_name("docker-compose"), options.torch)
    (options.place / "namespaces").write_text("\n".join(namespaces_of("self")))
    _data_in_memory(options.place / "data")
    run(["ip", "link", "set", "lo", "up"])
    try:
        with docker(env, options.place):
            _test(stack, supplies, env, options.place)
    except (AssertionError, CommandFailed, OSError) as error:
        say(f"FAILED: {error}")
        return 1
    return 0


def _data_in_memory(directory: Path) -> None:
    """Give the engine's data a tmpfs, if there is room: no wait for a disk, and nothing to delete."""
    directory.mkdir()
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    if int(memory["MemAvailable"].split()[0]) * 1024 > 2 * _DATA_BYTES:
        run(["mount", "-t", "tmpfs", "-o", f"size={_DATA_BYTES}", "tmpfs", directory])


def _test(stack: Stack, supplies: Supplies, env: dict[str, str], place: Path) -> None:
    say(f"engine: Docker {run(['docker', 'version', '--format', '{{.Server.Version}}'], env=env).strip()}")
    build_stand_ins(supplies, env, place)
    stack.build()
    stack.fill_cache(supplies.model)
    try:
        stack.up()
        first = checks.answers()
        checks.containers_are_confined(stack)
        checks.images_are_small(stack)
        checks.prometheus_sees_it()
        for service, program in (("decoder", "services.decoder"), ("kvstore", "services.kvstore")):
            checks.comes_back(stack, service, program)
            assert checks.answers() == first, f"another answer after {service} was killed"
    except BaseException:
        say(f"the services' last words:\n{stack.logs()}")
        raise
    stack.down()


if __name__ == "__main__":
    sys.exit(main())

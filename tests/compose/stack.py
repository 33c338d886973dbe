"""docker-compose.yml, brought up as a user would, but for the images that no registry can give here.

Knows Compose's commands and what Docker tells of a container; not what the services answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from deploy.lock import ROOT
from tests.compose.commands import CommandFailed, run
from tests.compose.images import BASE, PROMETHEUS, build
from tests.compose.say import step

SERVICES = ("kvstore", "decoder", "prometheus")
PATIENCE_SECONDS = 300.0


def until(true: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until `true()` is."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.2)


class Stack:
    """The project of one run."""

    def __init__(self, env: Mapping[str, str], compose: Path, torch: str) -> None:
        self._env = {
            **env,
            "HOTSET_BASE_IMAGE": BASE,
            "HOTSET_PROMETHEUS_IMAGE": PROMETHEUS,
            "HOTSET_TORCH": torch,
        }
        self._compose = [str(compose), "--project-name", "hotset", "--env-file", ".env.example"]

    def build(self) -> None:
        """Both images. Compose takes the classic builder, for want of buildx; `docker build` has BuildKit."""
        with step("building kvstore by the classic builder"):
            self._call("build", "kvstore")
        services = json.loads(self._call("config", "--format", "json"))["services"]
        with ThreadPoolExecutor() as pool:
            for done in [
                pool.submit(build, name, services[name], self._env) for name in ("kvstore", "decoder")
            ]:
                done.result()

    def fill_cache(self, model: Path) -> None:
        """Put the default model into the volume in which the decoder would keep it once fetched."""
        with step("filling the model cache"):
            volume = [
                "--label",
                "com.docker.compose.project=hotset",
                "--label",
                "com.docker.compose.volume=cache",
            ]
            run(["docker", "volume", "create", *volume, "hotset_cache"], env=self._env)
            mounts = ["-v", "hotset_cache:/cache", "-v", f"{model}:/model:ro"]
            copy = f"mkdir -p /cache/hotset/models && cp -r /model /cache/hotset/models/{model.name}"
            command = ["docker", "run", "--rm", *mounts, "--entrypoint", "sh", "hotset-decoder", "-c", copy]
            run(command, env=self._env)

    def up(self) -> None:
        """All services but Grafana, healthy."""
        with step("bringing the stack up"):
            self._call("up", "--detach", "--wait", "--wait-timeout", "600", *SERVICES)

    def down(self) -> None:
        """Containers, networks and volumes gone; nothing of ours is left in the engine."""
        with step("taking the stack down"):
            self._call("down", "--volumes", "--timeout", "20")
        for what in (["ps", "--all", "--quiet"], ["volume", "ls", "--quiet"]):
            left = run(["docker", *what], env=self._env)
            assert left == "", f"docker {' '.join(what)} after the end: {left}"

    def logs(self) -> str:
        """The last that the services said; for a failure's report, so it never fails itself."""
        try:
            return self._call("logs", "--no-color", "--tail", "60") + self._call("ps", "--all")
        except CommandFailed as error:
            return str(error)

    def inspect(self, service: str) -> dict[str, Any]:
        """What Docker tells of the service's container."""
        name = self._call("ps", "--all", "--quiet", service).strip()
        [found] = json.loads(run(["docker", "inspect", name], env=self._env))
        assert isinstance(found, dict)
        return found

    def inside(self, service: str, *command: str) -> str:
        """What a command in the service's container writes."""
        return self._call("exec", "-T", service, *command)

    def bytes_of(self, image: str) -> int:
        """What an image adds to the base image."""
        sizes = [
            run(["docker", "image", "inspect", "--format", "{{.Size}}", name], env=self._env)
            for name in (image, BASE)
        ]
        return int(sizes[0]) - int(sizes[1])

    def is_healthy(self, service: str) -> bool:
        """By the health check of its image or of the file."""
        state = self.inspect(service)["State"]
        return bool(state["Running"] and state["Health"]["Status"] == "healthy")

    def _call(self, *words: str, seconds: float = 1500) -> str:
        return run([*self._compose, *words], env=self._env, cwd=ROOT, seconds=seconds)


def commands_of(pid: int) -> Sequence[tuple[int, str]]:
    """Process and command line of the children of `pid`."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [
        (int(child), Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")) for child in text.split()
    ]

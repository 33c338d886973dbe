"""The images of the stack: two from their real Dockerfiles, and stand-ins for what a registry would give.

The stand-in for Python is a small Debian in whose /etc/pip.conf stands that packages come from /wheels.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.lock import ROOT
from tests.compose.commands import run
from tests.compose.say import step
from tests.compose.supplies import Supplies

BASE, PROMETHEUS = "hotset-test/python", "hotset-test/prometheus"
_BASE_FILE = """
FROM hotset-test/debian
COPY wheels /wheels
RUN printf '[global]\\nno-index = true\\nfind-links = /wheels\\n' > /etc/pip.conf
"""
_PROMETHEUS_FILE = """
FROM hotset-test/debian
COPY prometheus /bin/prometheus
RUN mkdir /prometheus && chown 65534:65534 /prometheus
USER 65534:65534
ENTRYPOINT ["/bin/prometheus"]
"""


def build_stand_ins(supplies: Supplies, env: Mapping[str, str], place: Path) -> None:
    """Base image and Prometheus, under the names above."""
    with step("importing the base image"):
        run(["docker", "import", supplies.debian, "hotset-test/debian"], env=env)
        context = place / "context"
        context.mkdir()
        shutil.copytree(supplies.wheels, context / "wheels", copy_function=os.link)
        shutil.copy(supplies.prometheus, context / "prometheus")
        for tag, text in ((BASE, _BASE_FILE), (PROMETHEUS, _PROMETHEUS_FILE)):
            (context / "Dockerfile").write_text(text)
            run(["docker", "build", "--tag", tag, context], env={**env, "DOCKER_BUILDKIT": "1"})
        shutil.rmtree(context)


def build(name: str, service: Mapping[str, Any], env: Mapping[str, str]) -> None:
    """The image of a service by BuildKit; `service` is what Compose makes of docker-compose.yml."""
    command = ["docker", "build", "--file", service["build"]["dockerfile"], "--tag", service["image"]]
    for argument, value in service["build"]["args"].items():
        command += ["--build-arg", f"{argument}={value}"]
    with step(f"building {name} by BuildKit"):
        run([*command, "."], env={**env, "DOCKER_BUILDKIT": "1"}, cwd=ROOT, seconds=1200)

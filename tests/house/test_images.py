"""The Dockerfiles and what they install: small, unprivileged, watched, from one lock that is up to date."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.docker.requirements import requirements
from deploy.lock import IMAGE_EXTRAS, LOCK, ROOT, TORCH, digest_line, inputs

NAMES = ("kvstore", "decoder")


def dockerfile(name: str) -> str:
    return (ROOT / f"deploy/docker/{name}.Dockerfile").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_hadolint_finds_nothing(name: str, tmp_path: Path) -> None:
    hadolint = str(Path(sys.executable).with_name("hadolint"))

    def said(text: str) -> str:
        path = tmp_path / "Dockerfile"
        path.write_text(text)
        done = subprocess.run([hadolint, "--no-color", path], capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    assert said(dockerfile(name)) == ""
    assert "DL3002" in said(f"{dockerfile(name)}\nUSER root\n"), "the check cannot fail"


@pytest.mark.parametrize("name", NAMES)
def test_an_image_is_small_unprivileged_and_watched(name: str) -> None:
    stages = re.split(r"^FROM ", dockerfile(name), flags=re.MULTILINE)[1:]
    bases = [stage.split()[0] for stage in stages]
    assert set(bases) <= {"${BASE_IMAGE}", "base"}
    last = stages[-1]
    for line in ("USER 10001:10001", "HEALTHCHECK", "ENTRYPOINT", "COPY --from=build /opt/hotset"):
        assert f"\n{line}" in last
    assert "pip install" not in last
    for compiler in ("gcc", "g++", "build-essential", "nvcc", "-devel"):
        assert compiler not in dockerfile(name)


def test_kvstore_has_nothing_of_the_decoder() -> None:
    assert "torch" not in dockerfile("kvstore").lower().replace("no torch", "")
    names = {Requirement(line).name for line in requirements(ROOT / "pyproject.toml", ["ucx"])}
    assert not names & {"torch", "transformers", "fastapi", "cuda-core"}


@pytest.mark.parametrize("name", NAMES)
def test_both_builders_know_every_instruction(name: str) -> None:
    text = dockerfile(name)
    for of_buildkit in ("--mount", "--chmod", "--link", "<<", "# syntax"):
        assert of_buildkit not in text


@pytest.mark.parametrize("name", NAMES)
def test_what_an_image_copies_is_in_its_context(name: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for source in _copied(dockerfile(name)):
        assert (ROOT / source).exists(), source
        assert any(
            source == line[1:] or source.startswith(f"{line[1:]}/") for line in ignored if line[0:1] == "!"
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_health_check_is_python(name: str) -> None:
    [command] = re.findall(r"HEALTHCHECK .*?CMD (\[.*?\])$", dockerfile(name), flags=re.MULTILINE | re.DOTALL)
    python, flag, what = yaml.safe_load(command)
    assert (python, flag) in {("python", "-c"), ("python", "-m")}
    if flag == "-c":
        compile(what, "healthcheck", "exec")
    else:
        assert (ROOT / f"{what.replace('.', '/')}.py").is_file()


def test_the_lock_is_of_what_pyproject_asks_for() -> None:
    lines = LOCK.read_text().splitlines()
    assert lines[1] == digest_line(inputs(ROOT)), "run `make lock`"


def test_the_lock_has_an_exact_version_of_everything_and_no_host() -> None:
    locked = [Requirement(line) for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    for found in locked:
        assert found.url is None
        assert [specifier.operator for specifier in found.specifier] == ["=="], found
    assert "://" not in LOCK.read_text()
    versions = {canonicalize_name(found.name): [next(iter(found.specifier)).version] for found in locked}
    for line in inputs(ROOT):
        wanted = Requirement(line)
        assert all(version in wanted.specifier for version in versions[canonicalize_name(wanted.name)]), line


def test_torch_is_one_version_everywhere() -> None:
    for file in ("Makefile", "deploy/install.py", "deploy/docker/decoder.Dockerfile", "docker-compose.yml"):
        assert TORCH in (ROOT / file).read_text(), file
    assert f"\n{TORCH}\n" in LOCK.read_text()


def test_requirements_are_those_of_the_extras() -> None:
    project = ROOT / "pyproject.toml"
    alone = requirements(project, [])
    assert any(line.startswith("grpcio>") for line in alone)
    assert set(alone) < set(requirements(project, IMAGE_EXTRAS))
    assert not set(alone) & set(requirements(project, ["build"])) - set(alone)
    with pytest.raises(KeyError, match="nothing"):
        requirements(project, ["nothing"])


def _copied(text: str) -> Iterator[str]:
    for line in re.findall(r"^COPY (?!--from)(.*)", text, flags=re.MULTILINE):
        yield from [part for part in line.split() if not part.startswith("--")][:-1]

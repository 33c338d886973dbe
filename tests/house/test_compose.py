"""docker-compose.yml is valid, agrees with the services' settings, the images and .env.example."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.contract.base_settings import ServiceSettings
from services.contract.byte_size import parse_bytes
from services.decoder.settings import DecoderSettings
from services.kvstore.settings import KvStoreSettings

ROOT = Path(__file__).resolve().parent.parent.parent
COMPOSE = ROOT / "docker-compose.yml"
VARIABLE = re.compile(r"\$\{(\w+)(:[-+])([^}]*)\}")
SETTINGS: Mapping[str, type[ServiceSettings]] = {"kvstore": KvStoreSettings, "decoder": DecoderSettings}


def _example() -> dict[str, str]:
    lines = (ROOT / ".env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def _interpolated(variables: Mapping[str, str]) -> dict[str, Any]:
    """The file as compose sees it: `${NAME:-default}` and `${NAME:+instead}`."""

    def value(match: re.Match[str]) -> str:
        name, kind, text = match.groups()
        return (variables.get(name) or text) if kind == ":-" else (text if variables.get(name) else "")

    loaded = yaml.safe_load(VARIABLE.sub(value, COMPOSE.read_text()))
    assert isinstance(loaded, dict)
    return loaded


@pytest.fixture
def compose() -> dict[str, Any]:
    return _interpolated({})


def test_the_file_follows_the_compose_specification(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    good = subprocess.run([*command, str(COMPOSE)], capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stdout
    broken = tmp_path / "docker-compose.yml"
    broken.write_text(COMPOSE.read_text().replace("depends_on", "depend_on"))
    bad = subprocess.run([*command, str(broken)], capture_output=True, text=True, check=False)
    assert bad.returncode != 0, "the check cannot fail"


def _compose_command() -> list[str] | None:
    """A compose on this machine, if it has one; the schema is checked everywhere."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if shutil.which("docker"):
        plugin = ["docker", "compose"]
        if subprocess.run([*plugin, "version"], capture_output=True, check=False).returncode == 0:
            return plugin
    return None


def test_compose_itself_accepts_it() -> None:
    command = _compose_command()
    if command is None:
        pytest.skip("no docker compose on this machine")
    subprocess.run([*command, "--env-file", ".env.example", "config", "-q"], cwd=ROOT, check=True)


def test_every_variable_is_in_the_example_with_its_default() -> None:
    found = {name: text for name, kind, text in VARIABLE.findall(COMPOSE.read_text()) if kind == ":-"}
    found["HOTSET_MODEL"] = ""  # stands for "none" in more than one way
    assert found == _example()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("variables", [{}, _example()], ids=["defaults", ".env.example"])
def test_the_environment_is_one_the_service_accepts(
    name: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = _interpolated(variables)["services"][name]
    kind = SETTINGS[name]
    for variable, value in service["environment"].items():
        assert variable.removeprefix("HOTSET_").lower() in kind.model_fields, variable
        monkeypatch.setenv(variable, str(value))
    if name == "decoder":
        monkeypatch.setenv("HOTSET_MODEL", "/cache/model")  # its entry point sets what is empty
    settings = kind.from_command_line(_command(name), program=name)
    assert settings.model_dump()["log_level"] == "info"


def test_a_checkpoint_of_the_host_is_mounted_where_the_decoder_looks() -> None:
    decoder = _interpolated({"HOTSET_MODEL": "/srv/llama"})["services"]["decoder"]
    assert decoder["environment"]["HOTSET_MODEL"] == "/model"
    assert "/srv/llama:/model:ro" in decoder["volumes"]


def test_the_decoder_waits_for_a_healthy_store(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(services) == {"kvstore", "decoder"}
    assert services["decoder"]["depends_on"]["kvstore"]["condition"] == "service_healthy"
    assert services["decoder"]["environment"]["HOTSET_KVSTORE"] == "kvstore:7700"


def test_both_map_one_tmpfs_at_one_path(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert "arena:/arena" in service["volumes"]
    options = compose["volumes"]["arena"]["driver_opts"]
    assert options["type"] == "tmpfs"
    mount = dict(part.split("=") for part in options["o"].split(","))
    arena = parse_bytes(compose["services"]["kvstore"]["environment"]["HOTSET_ARENA_BYTES"])
    assert arena < parse_bytes(mount["size"].replace("m", "MiB").replace("g", "GiB"))
    for name in SETTINGS:
        assert f"--uid {mount['uid']} --gid {mount['gid']}" in _dockerfile(name)


@pytest.mark.parametrize("name", SETTINGS)
def test_an_image_is_small_unprivileged_and_watched(name: str, compose: dict[str, Any]) -> None:
    build = compose["services"][name]["build"]
    text = (ROOT / build["context"] / build["dockerfile"]).read_text()
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)
    assert all(stage.startswith("${PYTHON_IMAGE}") for stage in stages[1:])
    assert set(build["args"]) == set(re.findall(r"^ARG (\w+)", text, flags=re.MULTILINE))
    for argument, value in build["args"].items():
        assert f"ARG {argument}={value}" in text, "compose and Dockerfile have one default"
    last = stages[-1]
    for line in ("USER hotset", "HEALTHCHECK", "ENTRYPOINT", "COPY --from=build /opt/hotset"):
        assert f"\n{line}" in last
    assert "pip install" not in last
    assert "apt" not in text
    assert "torch" not in _dockerfile("kvstore").lower().replace("no torch", "")


@pytest.mark.parametrize("name", SETTINGS)
def test_what_an_image_copies_is_in_its_context(name: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for source in _copied(_dockerfile(name)):
        assert (ROOT / source).exists(), source
        assert any(
            source == line[1:] or source.startswith(f"{line[1:]}/") for line in ignored if line[0:1] == "!"
        )


@pytest.mark.parametrize("name", SETTINGS)
def test_a_health_check_is_python(name: str) -> None:
    [program] = re.findall(r'CMD \["python", "-c", "(.*)"\]', _dockerfile(name))
    compile(program, "healthcheck", "exec")


def _dockerfile(name: str) -> str:
    return (ROOT / f"deploy/docker/{name}.Dockerfile").read_text()


def _command(name: str) -> list[str]:
    """The flags that the image's own CMD gives, as its last instruction."""
    loaded = yaml.safe_load(_dockerfile(name).rsplit("\nCMD ", 1)[1])
    return [str(flag) for flag in loaded]


def _copied(text: str) -> Iterator[str]:
    for line in re.findall(r"^COPY (?!--from)(.*)", text, flags=re.MULTILINE):
        yield from [part for part in line.split() if not part.startswith("--")][:-1]

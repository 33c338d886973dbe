"""The compose files are valid, and agree with the services' settings, the images and .env.example."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.contract.base_settings import ServiceSettings
from services.contract.byte_size import parse_bytes
from services.decoder.settings import DecoderSettings
from services.kvstore.settings import KvStoreSettings
from tests.house.test_images import dockerfile

ROOT = Path(__file__).resolve().parent.parent.parent
COMPOSE = ROOT / "docker-compose.yml"
OVERRIDES = {name: ROOT / f"docker-compose.{name}.yml" for name in ("gpu", "peers", "events")}
FILES = [COMPOSE, *OVERRIDES.values()]
VARIABLE = re.compile(r"\$\{(\w+)(?:(:[-+?])([^}]*))?\}")
SETTINGS: Mapping[str, type[ServiceSettings]] = {"kvstore": KvStoreSettings, "decoder": DecoderSettings}
NODE = {"HOTSET_NODE_ADDRESS": "10.0.0.1"}


def _example() -> dict[str, str]:
    lines = (ROOT / ".env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def _interpolated(variables: Mapping[str, str], path: Path = COMPOSE) -> dict[str, Any]:
    """A file as compose sees it: `${NAME:-default}`, `${NAME:+instead}`, `${NAME:?what it is}`, `${NAME}`."""

    def value(match: re.Match[str]) -> str:
        name, kind, text = match.groups()
        if kind == ":+":
            return str(text) if variables.get(name) else ""
        return variables.get(name) or (text if kind == ":-" else "")

    loaded = yaml.safe_load(VARIABLE.sub(value, path.read_text()))
    assert isinstance(loaded, dict)
    return loaded


def _compose(*files: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """What `docker compose config` says, by the Compose that the tests install."""
    command = [str(Path(sys.executable).with_name("docker-compose"))]
    command += [word for file in files for word in ("--file", str(file))]
    command += ["--env-file", str(ROOT / ".env.example"), "config", "--quiet"]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)


@pytest.fixture
def compose() -> dict[str, Any]:
    return _interpolated({})


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_follows_the_compose_specification(file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    good = subprocess.run([*command, str(file)], capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stdout
    broken = tmp_path / file.name
    broken.write_text(file.read_text().replace("environment:", "environs:"))
    bad = subprocess.run([*command, str(broken)], capture_output=True, text=True, check=False)
    assert bad.returncode != 0, "the check cannot fail"


@pytest.mark.parametrize(
    "overrides", [(), ("gpu",), ("peers",), ("gpu", "peers"), ("events",), ("peers", "events")], ids=str
)
def test_compose_itself_accepts_it(overrides: tuple[str, ...]) -> None:
    files = [COMPOSE, *(OVERRIDES[name] for name in overrides)]
    done = _compose(*files, **(NODE if "peers" in overrides else {}))
    assert (done.returncode, done.stderr) == (0, "")


def test_peers_without_an_address_are_refused_with_what_it_is() -> None:
    done = _compose(COMPOSE, OVERRIDES["peers"])
    assert done.returncode != 0
    assert "the address by which other nodes reach this one" in done.stderr


def test_every_variable_is_in_the_example_with_its_default() -> None:
    found = [match for file in FILES for match in VARIABLE.findall(file.read_text())]
    defaults = {
        name: {text for other, kind, text in found if (other, kind) == (name, ":-")} for name, _, _ in found
    }
    defaults["HOTSET_MODEL"] = {""}  # stands for "none" in more than one way
    defaults["HOTSET_NODE_ADDRESS"] = {""}  # has none
    assert {name: {value} for name, value in _example().items()} == defaults


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("variables", [{}, _example()], ids=["defaults", ".env.example"])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_environment_is_one_the_service_accepts(
    name: str, variables: dict[str, str], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = _interpolated(variables)["services"][name]
    kind = SETTINGS[name]
    of_image = dict(re.findall(r"\b(HOTSET_\w+)=(\S+)", dockerfile(name)))
    of_overrides = {
        **_interpolated({**variables, **NODE}, file)["services"].get(name, {}).get("environment", {})
    }
    for variable, value in (of_image | service["environment"] | of_overrides).items():
        if variable.startswith("HOTSET_"):
            assert variable.removeprefix("HOTSET_").lower() in kind.model_fields, variable
            monkeypatch.setenv(variable, "" if value is None else str(value))
    if name == "decoder":
        monkeypatch.setenv("HOTSET_MODEL", "/cache/model")  # its entry point sets what is empty
    settings = kind.from_command_line([], program=name)
    assert settings.model_dump()["log_level"] == "info"


def test_a_checkpoint_of_the_host_is_mounted_where_the_decoder_looks() -> None:
    decoder = _interpolated({"HOTSET_MODEL": "/srv/llama"})["services"]["decoder"]
    assert decoder["environment"]["HOTSET_MODEL"] == "/model"
    assert "/srv/llama:/model:ro" in decoder["volumes"]


def test_the_decoder_waits_for_a_healthy_store(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(services) == {"kvstore", "decoder", "prometheus", "grafana"}
    assert services["decoder"]["depends_on"]["kvstore"]["condition"] == "service_healthy"
    assert services["decoder"]["environment"]["HOTSET_KVSTORE"] == "kvstore:7700"


def test_both_map_one_tmpfs_at_one_path(compose: dict[str, Any]) -> None:
    for name in SETTINGS:
        assert "arena:/arena" in compose["services"][name]["volumes"]
    options = compose["volumes"]["arena"]["driver_opts"]
    assert options["type"] == "tmpfs"
    mount = dict(part.split("=") for part in options["o"].split(","))
    arena = parse_bytes(compose["services"]["kvstore"]["environment"]["HOTSET_ARENA_BYTES"])
    assert arena < parse_bytes(mount["size"].replace("m", "MiB").replace("g", "GiB"))
    for name in SETTINGS:
        assert f"--uid {mount['uid']} --gid {mount['gid']}" in dockerfile(name)
    assert mount["huge"] == "advise"


@pytest.mark.parametrize("name", SETTINGS)
def test_a_build_has_the_arguments_of_the_dockerfile(name: str, compose: dict[str, Any]) -> None:
    build = compose["services"][name]["build"]
    text = (ROOT / build["context"] / build["dockerfile"]).read_text()
    assert set(build["args"]) == set(re.findall(r"^ARG (\w+)", text, flags=re.MULTILINE))
    for argument, value in build["args"].items():
        assert f"ARG {argument}={value or ''}" in text, "compose and Dockerfile have one default"


def test_what_a_machine_may_refuse_is_in_an_override(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert "ulimits" not in service
        assert "deploy" not in service
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
    decoder = _interpolated({}, OVERRIDES["gpu"])["services"]["decoder"]
    assert decoder["ulimits"] == {"memlock": -1, "nofile": 1048576}
    [device] = decoder["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert decoder["build"]["args"]["EXTRAS"] == "decoder gpu"


def test_the_status_page_links_to_grafana(compose: dict[str, Any]) -> None:
    link = compose["services"]["decoder"]["environment"]["HOTSET_DASHBOARDS_URL"]
    [port] = compose["services"]["grafana"]["ports"]
    assert f"http://{port.removesuffix(':3000')}" == link


def test_kv_events_are_published_where_they_are_sent() -> None:
    store = _interpolated({}, OVERRIDES["events"])["services"]["kvstore"]
    for variable, port in zip(("HOTSET_KV_EVENTS", "HOTSET_KV_EVENTS_REPLAY"), store["ports"], strict=True):
        address, _, inside = port.rpartition(":")
        assert store["environment"][variable] == f"tcp://0.0.0.0:{inside}"
        assert address == f"127.0.0.1:{inside}", "tokens of prompts are told to this machine alone"


def test_figures_are_scraped_from_the_services(compose: dict[str, Any]) -> None:
    prometheus = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    targets = {
        target
        for job in prometheus["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    }
    assert targets == {"decoder:8000", "kvstore:7701"}
    for service, path in (
        ("prometheus", "./deploy/prometheus"),
        ("grafana", "./deploy/grafana/provisioning"),
    ):
        [mount] = [
            volume for volume in compose["services"][service]["volumes"] if volume.startswith(f"{path}:")
        ]
        assert mount.endswith(":ro")
        assert (ROOT / path).is_dir()

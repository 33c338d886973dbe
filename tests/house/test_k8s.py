"""The manifests build, are valid, and agree with the services' settings, the images and compose."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.contract.base_settings import ServiceSettings
from services.contract.byte_size import parse_bytes
from services.decoder.settings import DecoderSettings
from services.kvstore.settings import KvStoreSettings

ROOT = Path(__file__).resolve().parent.parent.parent
K8S = ROOT / "deploy/k8s"
OVERLAYS = ("cpu", "gpu")
SETTINGS: Mapping[str, type[ServiceSettings]] = {"kvstore": KvStoreSettings, "decoder": DecoderSettings}
Objects = dict[str, dict[str, Any]]


def _built(overlay: str) -> str:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl on this machine")
    path = str(K8S / "overlays" / overlay)
    built = subprocess.run([kubectl, "kustomize", path], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return built.stdout


@pytest.fixture(scope="module", params=OVERLAYS)
def objects(request: pytest.FixtureRequest) -> Objects:
    """By kind and name without kustomize's hash."""
    found: Objects = {}
    for one in yaml.safe_load_all(_built(request.param)):
        name = re.sub(r"-[0-9a-z]{10}$", "", one["metadata"]["name"]) if one["kind"] == "ConfigMap" else ""
        key = f"{one['kind']}/{name or one['metadata']['name']}"
        assert key not in found
        found[key] = one
    return found


def _pod(objects: Objects) -> dict[str, Any]:
    pod: dict[str, Any] = objects["StatefulSet/hotset"]["spec"]["template"]["spec"]
    return pod


def _container(objects: Objects, name: str) -> dict[str, Any]:
    pod = _pod(objects)
    [found] = [one for one in (*pod["initContainers"], *pod["containers"]) if one["name"] == name]
    assert isinstance(found, dict)
    return found


def _environment(objects: Objects, name: str) -> dict[str, str]:
    """What the container's ConfigMap gives it; the secret's one variable is checked by itself."""
    [reference] = [
        source["configMapRef"]["name"]
        for source in _container(objects, name)["envFrom"]
        if "configMapRef" in source
    ]
    made = objects[f"ConfigMap/hotset-{name}"]
    assert made["metadata"]["name"] == reference, "the pod reads another ConfigMap"
    data: dict[str, str] = made["data"]
    return data


def test_what_there_is(objects: Objects) -> None:
    assert sorted(objects) == [
        "ConfigMap/hotset-decoder",
        "ConfigMap/hotset-kvstore",
        "HorizontalPodAutoscaler/hotset",
        "PodDisruptionBudget/hotset",
        "Service/hotset",
        "Service/hotset-pods",
        "ServiceMonitor/hotset",
        "StatefulSet/hotset",
    ]


def test_they_follow_the_schemas_of_kubernetes(objects: Objects) -> None:
    for key, one in objects.items():
        if not key.startswith("ServiceMonitor/"):  # the operator's, of which there is no schema here
            kubernetes_validate.validate(one, "1.34", strict=True)
    broken = yaml.safe_load(yaml.safe_dump(objects["StatefulSet/hotset"]))
    broken["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.34", strict=True)


def _settings(objects: Objects, name: str, monkeypatch: pytest.MonkeyPatch) -> ServiceSettings:
    """What the service makes of its arguments and environment."""
    kind = SETTINGS[name]
    with monkeypatch.context() as patch:
        for variable, value in _environment(objects, name).items():
            assert variable.removeprefix("HOTSET_").lower() in kind.model_fields, variable
            patch.setenv(variable, value)
        if name == "decoder":
            patch.setenv("HOTSET_API_KEYS", '["from-the-secret"]')
            patch.setenv("HOTSET_MODEL", _environment(objects, name).get("HOTSET_MODEL", "/cache/bundled"))
        return kind.from_command_line(_container(objects, name)["args"], program=name)


@pytest.fixture
def store(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> KvStoreSettings:
    settings = _settings(objects, "kvstore", monkeypatch)
    assert isinstance(settings, KvStoreSettings)
    return settings


@pytest.fixture
def decoder(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> DecoderSettings:
    settings = _settings(objects, "decoder", monkeypatch)
    assert isinstance(settings, DecoderSettings)
    return settings


@pytest.mark.parametrize("name", SETTINGS)
def test_arguments_and_variables_say_different_things(objects: Objects, name: str) -> None:
    """An argument beats a variable, so that one who sets the variable would wonder."""
    arguments = {one.split("=")[0].removeprefix("--") for one in _container(objects, name)["args"]}
    variables = {one.removeprefix("HOTSET_").lower().replace("_", "-") for one in _environment(objects, name)}
    assert not arguments & variables


def test_ports_agree(objects: Objects, store: KvStoreSettings, decoder: DecoderSettings) -> None:
    named = {
        port["name"]: port["containerPort"]
        for name in SETTINGS
        for port in _container(objects, name)["ports"]
    }
    assert named == {"http": decoder.port, "store-metrics": store.metrics_port}
    assert (decoder.host, store.metrics_host) == ("0.0.0.0", "0.0.0.0"), "what is asked from outside"
    assert decoder.kvstore == store.listen
    for service in ("Service/hotset", "Service/hotset-pods"):
        for port in objects[service]["spec"]["ports"]:
            assert named[port["targetPort"]] == port["port"]
    scraped = objects["Service/hotset-pods"]
    monitor = objects["ServiceMonitor/hotset"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= scraped["metadata"]["labels"].items()
    assert {one["port"] for one in monitor["endpoints"]} == {one["name"] for one in scraped["spec"]["ports"]}


def test_labels_find_the_pods(objects: Objects) -> None:
    stateful = objects["StatefulSet/hotset"]["spec"]
    labels = stateful["template"]["metadata"]["labels"]
    selectors = [
        stateful["selector"]["matchLabels"],
        objects["PodDisruptionBudget/hotset"]["spec"]["selector"]["matchLabels"],
        objects["Service/hotset"]["spec"]["selector"],
        objects["Service/hotset-pods"]["spec"]["selector"],
    ]
    for selector in selectors:
        assert selector, "everything in the namespace would be meant"
        assert selector.items() <= labels.items()
    assert stateful["serviceName"] == objects["Service/hotset-pods"]["metadata"]["name"]
    target = objects["HorizontalPodAutoscaler/hotset"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == (
        "StatefulSet",
        objects["StatefulSet/hotset"]["metadata"]["name"],
    )
    assert "replicas" not in stateful, "applying again would undo what the autoscaler did"


def test_images_are_those_of_compose(objects: Objects) -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for name in SETTINGS:
        image, tag = _container(objects, name)["image"].split(":")
        assert image == compose[name]["image"].split(":")[0]
        assert tag


def test_the_arena_fits_its_volume_and_the_memory_that_it_counts_against(
    objects: Objects, store: KvStoreSettings
) -> None:
    arena = store.arena_bytes
    volumes = {volume["name"]: volume for volume in _pod(objects)["volumes"]}
    assert volumes["arena"]["emptyDir"]["medium"] == "Memory"
    size = _bytes(volumes["arena"]["emptyDir"]["sizeLimit"])
    assert arena < size <= arena * 1.1
    for name in SETTINGS:
        container = _container(objects, name)
        paths = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert store.arena_dir.is_relative_to(paths["arena"]), "the same path in both: kvstore tells it"
        assert _bytes(container["resources"]["limits"]["memory"]) > size
    requested = sum(_bytes(_container(objects, name)["resources"]["requests"]["memory"]) for name in SETTINGS)
    assert requested > size


def test_probes_ask_what_exists(objects: Objects, store: KvStoreSettings) -> None:
    routes = (ROOT / "services/decoder/front/routes/operations.py").read_text()
    for name in SETTINGS:
        container = _container(objects, name)
        ports = {port["name"] for port in container["ports"]}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container[kind]
            if "exec" in probe:
                interpreter, option, program = probe["exec"]["command"]
                assert (interpreter, option) == ("python", "-c")
                ast.parse(program)
                assert store.listen in program
                continue
            assert probe["httpGet"]["port"] in ports
            assert f'"{probe["httpGet"]["path"]}"' in routes or name == "kvstore"
    decoder = _container(objects, "decoder")
    assert decoder["livenessProbe"]["httpGet"]["path"] == "/health", "a start takes minutes, and is no death"
    assert decoder["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert _container(objects, "kvstore")["restartPolicy"] == "Always", (
        "else the decoder would wait for its end"
    )


def test_the_grace_period_covers_what_the_end_takes(objects: Objects, decoder: DecoderSettings) -> None:
    leave = _container(objects, "decoder")["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert _pod(objects)["terminationGracePeriodSeconds"] >= leave + decoder.shutdown_seconds + 10


def test_nothing_runs_as_root_or_writes_its_image(objects: Objects) -> None:
    pod = _pod(objects)
    context = pod["securityContext"]
    assert context["runAsNonRoot"]
    assert context["seccompProfile"]["type"] == "RuntimeDefault"
    user = context["runAsUser"]
    assert user == context["fsGroup"]
    for name in SETTINGS:
        assert f"--uid {user} " in (ROOT / f"deploy/docker/{name}.Dockerfile").read_text()
        assert _container(objects, name)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_the_autoscaler_asks_for_what_the_adapter_makes_of_our_metrics(objects: Objects) -> None:
    asked = {
        metric["pods"]["metric"]["name"]
        for metric in objects["HorizontalPodAutoscaler/hotset"]["spec"]["metrics"]
    }
    rules = yaml.safe_load((K8S / "prometheus-adapter-values.yaml").read_text())["rules"]["custom"]
    assert asked == {rule["name"]["as"] for rule in rules}
    listed = (ROOT / "docs/metrics.md").read_text()
    for rule in rules:
        series = rule["seriesQuery"].split("{")[0]
        assert f"`{series.removesuffix('_bucket')}`" in listed, series


def _bytes(quantity: str) -> int:
    return parse_bytes(f"{quantity}B")

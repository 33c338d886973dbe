"""The status page's files: served whole, open, under a strict policy, and true of the metrics they name.

What it looks like and does is seen in a real browser: tests/browser.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from services.decoder.front.routes.page import PATHS
from services.decoder.settings import DecoderSettings
from tests.front.live import ROOT, LiveFront, live_front

PAGE = ROOT / "services/decoder/front/page"
SCRIPTS = "\n".join(path.read_text() for path in sorted(PAGE.glob("*.js")))


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def page(front: LiveFront) -> httpx.Response:
    return httpx.get(front.url + "/")


def test_every_file_of_it_is_there(front: LiveFront, page: httpx.Response) -> None:
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    named = {
        value
        for tag, attributes in Elements(page.text).found
        for name, value in attributes.items()
        if name in ("src", "href") and tag != "a" and value
    }
    named |= {f"/status/{name}" for name in re.findall(r'"\./([\w.]+)"', SCRIPTS)}
    assert named | {"/"} == set(PATHS)
    for path in PATHS:
        answer = httpx.get(front.url + path)
        assert answer.status_code == 200, path
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert answer.headers["x-content-type-options"] == "nosniff"
        head = httpx.head(front.url + path)
        assert (head.status_code, head.content) == (200, b"")


def test_nothing_comes_from_elsewhere_or_stands_inline(page: httpx.Response) -> None:
    policy = page.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "http" not in policy
    for tag, attributes in Elements(page.text).found:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
        assert tag != "style"
        assert tag != "script" or "src" in attributes
        for name in ("src", "href"):
            assert str(attributes.get(name, "/")).startswith("/"), attributes
    for risky in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage"):
        assert risky not in SCRIPTS, risky
    addresses = set(re.findall(r"https?://[^\s\"')]+", SCRIPTS + (PAGE / "status.css").read_text()))
    assert addresses == {"http://www.w3.org/2000/svg"}


def test_it_names_metrics_and_elements_that_there_are(page: httpx.Response) -> None:
    documented = (ROOT / "docs/metrics.md").read_text()
    metrics = set(re.findall(r"hotset_\w+", SCRIPTS))
    assert len(metrics) > 15
    for metric in metrics:
        assert f"`{re.sub('_(sum|count)$', '', metric)}`" in documented, metric
    ids = {attributes.get("id") for _, attributes in Elements(page.text).found}
    for wanted in re.findall(r'byId\("([\w-]+)"\)', SCRIPTS):
        assert wanted in ids, wanted


def test_every_field_has_its_label(page: httpx.Response) -> None:
    found = Elements(page.text).found
    labels = {attributes.get("for") for tag, attributes in found if tag == "label"}
    for tag, attributes in found:
        if tag in ("input", "textarea"):
            assert attributes["id"] in labels
        if tag == "img":
            assert "alt" in attributes
    assert dict(found)["html"] == {"lang": "en"}


def test_clients_of_the_api_are_not_told_of_it(front: LiveFront) -> None:
    assert not [path for path in httpx.get(f"{front.url}/openapi.json").json()["paths"] if path in PATHS]


def test_it_is_open_where_keys_are_asked_for(default_model: Path) -> None:
    flags = ("--api-keys=secret", '--dashboards-url=https://h/d?a=1&b="><script>x</script>')
    with live_front(default_model, *flags) as guarded:
        for path in PATHS:
            assert httpx.get(guarded.url + path).status_code == 200
        assert httpx.get(f"{guarded.url}/v1/models").status_code == 401
        text = httpx.get(guarded.url + "/").text
    [link] = [
        attributes
        for tag, attributes in Elements(text).found
        if str(attributes.get("href")).startswith("https")
    ]
    assert link["href"] == 'https://h/d?a=1&b="><script>x</script>'
    assert "<script>x" not in text


def test_dashboards_lie_at_an_address() -> None:
    for wrong in ("javascript:alert(1)", "grafana:3000"):
        with pytest.raises(ValidationError, match="dashboards_url"):
            DecoderSettings.model_validate({"model": Path(), "dashboards_url": wrong})

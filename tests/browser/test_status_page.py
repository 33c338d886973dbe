"""The status page in headless Chromium: figures, answers as text, keys, errors, phones, the dark."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.front.live import LiveFront, live_front, until
from tests.front.real import Service, real_service, tiny_model

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytest.importorskip("selenium", reason="needs selenium: make test-browser")
from tests.browser.chromium import chromium  # after the check that it can be imported

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("chromedriver") is None, reason="needs chromium: make test-browser"),
]

SAYS = "<script>document.title = 'owned'</script><b>bold</b> & <img src=x onerror=\"document.title='owned'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    with chromium() as driver:
        yield driver


@pytest.fixture(scope="module")
def talker(default_model: Path) -> Iterator[LiveFront]:
    with live_front(default_model, start={"orders": {"say": SAYS, "per_event": 4, "pause": 0.02}}) as front:
        yield front


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Service]:
    model = tiny_model(tmp_path_factory.mktemp("model"), default_model)
    with real_service(model, 64 * 2**20, budget_tokens=64, hot_tokens=128) as running:
        yield running


def text(driver: Chrome, selector: str) -> str:
    found: str = driver.execute_script("return document.querySelector(arguments[0]).textContent", selector)
    return found


def shown(driver: Chrome, selector: str, wanted: Callable[[str], object], what: str) -> str:
    until(lambda: wanted(text(driver, selector)), what, 120)
    return text(driver, selector)


def click(driver: Chrome, selector: str) -> None:
    driver.execute_script("document.querySelector(arguments[0]).click()", selector)


def fill(driver: Chrome, selector: str, value: str) -> None:
    script = (
        "const field = document.querySelector(arguments[0]); field.value = arguments[1];"
        "field.dispatchEvent(new Event('change'))"
    )
    driver.execute_script(script, selector, value)


def complaints(driver: Chrome) -> list[str]:
    entries = driver.execute("getLog", {"type": "browser"})["value"]
    return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]


def test_figures_of_a_server_under_load(browser: Chrome, service: Service) -> None:
    browser.get(service.url)
    shown(browser, "#state", lambda state: state == "serving", "the state")
    body = {"model": "fake", "prompt": "to be or not to be " * 40, "max_tokens": 60}
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(service.ask, "/v1/completions", body) for _ in range(6)]
        shown(browser, "#cards .card:nth-child(1) .value", lambda value: value.endswith("%"), "a hit rate")
        shown(
            browser, "#cards .card:nth-child(2) .value", lambda value: value.endswith("s"), "a time per token"
        )
        for one in asked:
            one.result(300)
    until(lambda: "0 of 6" in text(browser, "#meters"), "rows that are free again", 60)
    told = text(browser, "#meters")
    for meter in ("Rows", "Hot slots", "Device pages", "Arena pages"):
        assert meter in told
    generated = int(service.metric("hotset_generation_tokens_total"))
    note = "#cards .card:nth-child(3) .small"
    shown(browser, note, lambda value: value == f"{generated:,} since the start", "all tokens counted")
    assert text(browser, "#engine-rows").startswith("0serving")
    assert "cpu" in text(browser, "#engine-rows")
    layers = browser.execute_script("return document.querySelectorAll('#layer-bars div').length")
    scrape = httpx.get(f"{service.url}/metrics", timeout=30).text
    assert layers == len(re.findall(r"^hotset_hot_buffer_hits_total\{", scrape, re.MULTILINE)) > 0
    points = browser.execute_script("return document.querySelectorAll('#cards svg polyline').length")
    assert points >= 5
    assert text(browser, "#model") == "fake"
    assert browser.title == "fake - hotset"
    assert complaints(browser) == []


def test_an_answer_is_text_whatever_it_holds(browser: Chrome, talker: LiveFront) -> None:
    browser.get(talker.url)
    shown(browser, "#model", lambda name: name == "fake", "the model's name")
    title = browser.title
    click(browser, "#send")
    shown(browser, "#timing", lambda timing: "tokens in" in timing, "the answer's end")
    assert text(browser, "#answer") == SAYS
    inside: int = browser.execute_script("return document.querySelectorAll('#answer *').length")
    assert inside == 0
    assert browser.title == title
    assert complaints(browser) == []


def test_an_answer_comes_in_pieces_and_can_be_stopped(default_model: Path, browser: Chrome) -> None:
    orders = {"say": "word " * 400, "per_event": 1, "pause": 0.1}
    with live_front(default_model, start={"orders": orders}) as slow:
        browser.get(slow.url)
        shown(browser, "#model", lambda name: name == "fake", "the model's name")
        fill(browser, "#max-tokens", "900")
        click(browser, "#send")
        first = shown(browser, "#answer", lambda said: said, "a beginning")
        shown(browser, "#answer", lambda said: len(said) > len(first), "more of it")
        click(browser, "#stop")
        shown(browser, "#timing", lambda timing: timing == "stopped", "the stop")
        until(lambda: slow.noted("abort"), "the engine to hear of it")
        assert not browser.execute_script("return document.getElementById('send').disabled")


def test_keys(browser: Chrome, default_model: Path) -> None:
    with live_front(default_model, "--api-keys=right", start={"orders": {"say": "Paris."}}) as guarded:
        browser.get(guarded.url)
        until(lambda: not hidden(browser, "#key-row"), "the field for the key", 120)
        shown(browser, "#state", lambda state: state == "serving", "figures without a key")
        fill(browser, "#key", "wrong")
        click(browser, "#send")
        shown(browser, "#answer", lambda said: "not accepted" in said, "the refusal")
        assert text(browser, "#model") == ""
        fill(browser, "#key", "right")
        shown(browser, "#model", lambda name: name == "fake", "the model's name")
        click(browser, "#send")
        shown(browser, "#answer", lambda said: said == "Paris.", "the answer")
    [only] = {line.split("status of ")[1][:3] for line in complaints(browser) if "status of" in line}
    assert only == "401"


def hidden(driver: Chrome, selector: str) -> bool:
    return bool(driver.execute_script("return document.querySelector(arguments[0]).hidden", selector))


def test_a_refused_prompt_and_a_server_that_goes_away(browser: Chrome, default_model: Path) -> None:
    with live_front(default_model, start={"max_model_len": 64}) as front:
        browser.get(front.url)
        shown(browser, "#model", lambda name: name == "fake", "the model's name")
        fill(browser, "#prompt", "long " * 500)
        click(browser, "#send")
        shown(browser, "#answer", lambda said: "tokens" in said, "the reason")
        assert browser.execute_script("return document.getElementById('answer').className") == "wrong"
        assert front.stop() == 0
        shown(browser, "#state", lambda state: state == "out of reach", "the loss to be noticed")
        assert "goes on asking" in text(browser, "#trouble")


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_it_fits(talker: LiveFront, width: int) -> None:
    backgrounds = []
    for dark in (False, True):
        with chromium(width, 800, dark=dark) as driver:
            driver.get(talker.url)
            shown(driver, "#engine-rows", lambda rows: "serving" in rows, "the engines")
            wide: list[int] = driver.execute_script(
                "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
            )
            assert wide[0] <= wide[1] == width
            backgrounds.append(
                driver.execute_script("return getComputedStyle(document.body).backgroundColor")
            )
            assert unnamed(driver) == []
    assert backgrounds[0] != backgrounds[1]


def unnamed(driver: Chrome) -> list[Any]:
    """What a screen reader would come upon without a name."""
    roles = ("button", "textbox", "spinbutton", "meter", "image", "img", "link", "status", "region", "table")
    nodes = driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    found = [node for node in nodes if not node["ignored"] and node["role"]["value"] in roles]
    assert len(found) > 10
    silent = [node for node in found if not node.get("name", {}).get("value")]
    return [node["role"]["value"] for node in silent if node["role"]["value"] not in ("status", "table")]

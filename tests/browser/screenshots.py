"""`python -m tests.browser.screenshots [--url URL]`: pictures of the status page under load, for the docs.

Knows the sizes of desktops and phones. The server is a running one; the load is this program's own.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import random
import threading
import time
from pathlib import Path

from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from services.command.bench.measure import Prompts
from services.command.bench.streams import ask
from services.command.server import Server
from tests.browser.chromium import chromium

IMAGES = Path(__file__).resolve().parents[2] / "docs/images"
LOAD_SECONDS = 90.0
"""A line of the page holds two minutes; most of it is to be there."""
PICTURES = {
    "status.png": (1200, 900, False, 1.0),
    "status-dark.png": (1200, 900, True, 1.0),
    "status-phone.png": (390, 844, False, 1.25),
}
"""File -> width, height, dark, scale."""


def load(server: Server, ended: threading.Event) -> None:
    """Streams of real text, more and fewer of them, until told to end."""
    model = str(server.model()["id"])
    prompts = Prompts(server, model, random.randrange(10**6))
    while not ended.is_set():
        count = random.choice((1, 2, 3))
        asked = prompts.take(random.choice((200, 400, 800)), count)
        asyncio.run(ask(server, asked, random.choice((40, 60, 90)), model))


def picture(driver: Chrome, path: Path) -> None:
    """The whole page, as long as it is."""
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "format": "png"})
    path.write_bytes(base64.b64decode(shot["data"]))


def main() -> None:
    """Load the server, wait, ask, and take the pictures one browser after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    server = Server.at(parser.parse_args().url)
    IMAGES.mkdir(exist_ok=True)
    for name, (width, height, dark, scale) in PICTURES.items():
        ended = threading.Event()
        loading = [threading.Thread(target=load, args=(server, ended)) for _ in range(2)]
        with chromium(width, height, dark=dark, scale=scale) as driver:
            driver.get(server.url)
            for thread in loading:
                thread.start()
            time.sleep(LOAD_SECONDS)
            driver.execute_script("document.getElementById('max-tokens').value = 48")
            driver.find_element(By.ID, "send").click()
            while driver.find_element(By.ID, "stop").is_enabled():
                time.sleep(0.5)
            picture(driver, IMAGES / name)
        ended.set()
        for thread in loading:
            thread.join()
        print(f"{name}: {(IMAGES / name).stat().st_size} bytes")


if __name__ == "__main__":
    main()

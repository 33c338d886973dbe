"""Debian's chromium without a screen, driven by selenium: a fresh profile each, and no request of its own.

Knows flags. What a page must do is in the tests.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--no-proxy-server",
)


@contextmanager
def chromium(
    width: int = 1280, height: int = 900, *, dark: bool = False, scale: float = 1.0
) -> Iterator[webdriver.Chrome]:
    """A browser; gone afterwards, with its profile.

    Args:
        width: of the window, CSS pixels.
        height: of the window.
        dark: whether the person prefers dark.
        scale: device pixels of a CSS pixel.
    """
    with tempfile.TemporaryDirectory(prefix="hotset-chromium-", ignore_cleanup_errors=True) as profile:
        options = Options()
        options.binary_location = shutil.which("chromium") or ""
        for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
        try:
            driver.set_page_load_timeout(120)
            driver.set_script_timeout(120)
            metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            yield driver
        finally:
            driver.quit()

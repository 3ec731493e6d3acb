"""A headless browser for tests of pages."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

needs_chromium = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="Chromium is not installed (apt-get install chromium chromium-driver)",
)


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[webdriver.Chrome]:
    """Yields a browser that logs its requests, and ends it at the end of the context."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(word)
    options.add_argument("--window-size=1200,1400")
    options.add_argument(f"--user-data-dir={folder / 'browser'}")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    service = webdriver.ChromeService(str(shutil.which("chromedriver")))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()

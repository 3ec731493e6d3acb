"""Tests report.html of a real run on two workers in a browser."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By

from tests.support.browser import chromium, needs_chromium
from tests.support.processes import run

pytestmark = [pytest.mark.processes, needs_chromium]

LIMIT_S = 240


def test_the_page_shows_all_workers_and_loads_nothing(tmp_path: Path) -> None:
    argv = ["-m", "tfmulti.launch", "--nproc-per-node", "2", "--log-dir", str(tmp_path / "logs")]
    argv += [
        "--no-standby",
        "-m",
        "tfmulti.fit",
        "--epochs",
        "2",
        "--run_dir",
        str(tmp_path / "run"),
    ]
    done = run(argv, tmp_path / "launcher", limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    page = tmp_path / "run" / "report.html"
    with chromium(tmp_path) as browser:
        browser.get(page.as_uri())
        rows = {
            row.find_element(By.TAG_NAME, "th").text: row.find_element(By.TAG_NAME, "td").text
            for row in browser.find_elements(By.TAG_NAME, "tr")
        }
        [curves] = browser.find_elements(By.TAG_NAME, "svg")
        assert curves.size["width"] > 300
        events = [
            json.loads(entry["message"])["message"] for entry in browser.get_log("performance")
        ]
        browser.save_screenshot(str(tmp_path / "report.png"))
    for rank in range(2):
        assert rows[f"worker {rank}"].startswith(f"{platform.node()}: CPU:0 (at 127.0.0.1:")
    # The browser's own pages ask for their parts, too.
    asked = {
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
        and event["params"]["documentURL"] == page.as_uri()
    }
    assert asked == {page.as_uri()}

"""A notebook in JupyterLab in a browser: the bar moves, the curves are drawn, interrupting works.

Needs Chromium with its driver (apt-get install chromium chromium-driver).
"""

from __future__ import annotations

import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.support.browser import chromium, needs_chromium
from tests.support.processes import ROOT, processes

pytestmark = [
    pytest.mark.processes,
    needs_chromium,
]
LIMIT_S = 120.0

CELLS = [
    """
import numpy as np
from tfmulti import notebook_launcher

def train():
    import time, keras, tfmulti
    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.2)
    strategy = tfmulti.make_strategy()
    with strategy.scope():
        model = tfmulti.prepare(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
        model.compile("sgd", "mse")
    x = np.ones((64, 4), "float32")
    shown = [Slow(), tfmulti.LiveCurves()]
    return model.fit(x, x[:, :1], batch_size=8, epochs=3, callbacks=shown)
""",
    "history = notebook_launcher(train, workers=2)\nprint('epochs', len(history.epoch))",
    """
def waits():
    import time
    print("begun", flush=True)
    time.sleep(600)

notebook_launcher(waits, workers=2)
""",
    "print(6 * 7)",
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A JupyterLab whose folder holds the notebook `a.ipynb`; gives the notebook's address."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    folder = tmp_path / "notebooks"
    folder.mkdir()
    nbformat.write(notebook, folder / "a.ipynb")
    token = secrets.token_hex(16)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    words = ["-m", "jupyterlab", "--no-browser", "--allow-root"]
    words += [f"--ServerApp.port={port}", f"--IdentityProvider.token={token}"]
    words += [f"--ServerApp.root_dir={folder}", "--LabApp.news_url=None"]
    env = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": "3"}
    with processes(tmp_path / "jupyter") as group:
        group.start(words, env)
        until(lambda: "is running at" in group.errors(0))
        yield f"http://127.0.0.1:{port}/lab/tree/a.ipynb?token={token}"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    with chromium(tmp_path) as driver:
        yield driver


def until(condition: Callable[[], object]) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            if condition():
                return
        except WebDriverException:
            # JupyterLab redraws its page while it is read.
            pass
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.1)


class Page:
    """The open notebook."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self._driver = driver

    def run_cell(self) -> None:
        """Runs the selected cell, and selects the next one."""
        self._cells()
        webdriver.ActionChains(self._driver).key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(
            Keys.SHIFT
        ).perform()

    def interrupt(self) -> None:
        """Interrupts the kernel by JupyterLab's keys, I twice."""
        webdriver.ActionChains(self._driver).send_keys(Keys.ESCAPE, "i", "i").perform()

    def shown(self, cell: int) -> str:
        """Returns the text that a cell shows."""
        areas = self._cells()[cell].find_elements(By.CSS_SELECTOR, ".jp-OutputArea-output")
        return "\n".join(area.text for area in areas)

    def pictures(self, cell: int) -> int:
        """Returns how many pictures a cell shows."""
        shown = ".jp-OutputArea-output svg"
        return len(self._cells()[cell].find_elements(By.CSS_SELECTOR, shown))

    def _cells(self) -> list[webdriver.remote.webelement.WebElement]:
        return self._driver.find_elements(By.CSS_SELECTOR, ".jp-CodeCell")


def test_a_notebook_in_a_browser(server: str, browser: webdriver.Chrome, tmp_path: Path) -> None:
    browser.get(server)
    page = Page(browser)
    until(lambda: len(browser.find_elements(By.CSS_SELECTOR, ".jp-CodeCell")) == len(CELLS))
    until(lambda: "Idle" in browser.find_element(By.TAG_NAME, "body").text)
    browser.find_elements(By.CSS_SELECTOR, ".jp-CodeCell .cm-content")[0].click()
    page.run_cell()
    page.run_cell()
    bars: set[str] = set()

    def ended() -> bool:
        bars.update(re.findall(r"\d/8", page.shown(1)))
        return "epochs 3" in page.shown(1)

    until(ended)
    # The bar moved on one line.
    assert len(bars) > 3, bars
    assert page.shown(1).count("Epoch 2/3") == 1
    assert page.pictures(1)
    browser.save_screenshot(str(tmp_path / "trained.png"))
    page.run_cell()
    until(lambda: "begun" in page.shown(2))
    page.interrupt()
    until(lambda: "KeyboardInterrupt" in page.shown(2))

    def answers() -> bool:
        # JupyterLab may move the cells between the search and the click, which then hits another.
        browser.find_elements(By.CSS_SELECTOR, ".jp-CodeCell .cm-content")[3].click()
        page.run_cell()
        time.sleep(1)
        return "42" in page.shown(3)

    # The kernel lives.
    until(answers)
    browser.save_screenshot(str(tmp_path / "interrupted.png"))

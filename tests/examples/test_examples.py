"""Tests that each example runs, and ends, as its first lines say."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.support.forked import run, run_workers
from tests.support.processes import ROOT, clean_env

pytestmark = pytest.mark.processes

EXAMPLES = ROOT / "examples"


def expected_number(file: str, pattern: str, output: str) -> float:
    """Returns the number of the last line; the example's text has a line of the same form."""
    assert re.search(pattern, (EXAMPLES / file).read_text()), "the example promises something else"
    found = re.search(pattern, output)
    assert found, output
    return float(found[1])


def test_regression(tmp_path: Path) -> None:
    done = run([str(EXAMPLES / "regression.py")], tmp_path / "logs", limit_s=60, cwd=tmp_path)
    assert expected_number("regression.py", r"loss [\d.]+ -> ([\d.]+)", done.stdout) < 0.1


@pytest.mark.parametrize("workers", [1, 2])
def test_own_train_step(tmp_path: Path, workers: int) -> None:
    file = "own_train_step.py"
    argv = [str(EXAMPLES / file)]
    if workers == 1:
        done = [run(argv, tmp_path / "logs", limit_s=60, cwd=tmp_path)]
    else:
        done = run_workers(argv, workers, tmp_path / "logs", limit_s=60, cwd=tmp_path)
    for worker in done:
        assert f"on {workers} replicas" in worker.stdout
        assert expected_number(file, r"accuracy ([\d.]+) on \d replicas", worker.stdout) > 0.9


def test_two_workers(tmp_path: Path) -> None:
    code = "import os, sys; os.execvp('bash', ['bash', *sys.argv[1:]])"
    script = str(EXAMPLES / "two_workers.sh")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = run(
        ["-c", code, script, "r"], tmp_path / "logs", limit_s=90, cwd=tmp_path, env={"PATH": path}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "r" / "report.json").read_text())["workers"] == 2


def test_notebook(tmp_path: Path) -> None:
    """The file runs in a real kernel, cell after cell."""
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    env = clean_env({"PYTHONPATH": str(ROOT)})
    client = nbclient.NotebookClient(notebook, timeout=90, kernel_name="python3")
    with client.setup_kernel(env=env, cwd=str(tmp_path)):
        # An error in a cell is raised here.
        for number, cell in enumerate(notebook.cells):
            client.execute_cell(cell, number)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    texts = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    assert "Epoch 5/5" in texts
    assert "loss" in outputs[-1]["data"]["text/plain"]
    assert len(list(tmp_path.glob("runs/digits-cnn-*/report.json"))) == 1

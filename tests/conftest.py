"""Runs that several tests read: each made once, when the first test asks for it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.processes import run, run_workers

LIMIT_S = 240  # of one process that runs all cases; the longest takes 70 s on two cores

Arrays = dict[str, dict[str, np.ndarray]]


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Arrays]]:
    """Returns `cases(kind, count)`: what each worker's run of tests.support.cases left.

    The result is a list, an entry a worker: case -> name -> array.
    """

    @functools.cache
    def results(kind: str, count: int = 1) -> list[Arrays]:
        folder = tmp_path_factory.mktemp(f"{kind}-{count}")
        _start("tests.support.cases", folder / "out_RANK.npz", kind, count)
        return [_by_case(file) for file in sorted(folder.glob("out_*.npz"))]

    return results


@pytest.fixture(scope="session")
def behaviours(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """Returns `behaviours(kind, count)`: what each worker's behaviours returned, by name."""

    @functools.cache
    def results(kind: str, count: int = 1) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp(f"behaviours-{kind}-{count}")
        _start("tests.support.behaviours", folder / "out_RANK.json", kind, count)
        return [json.loads(file.read_text()) for file in sorted(folder.glob("out_*.json"))]

    return results


def _start(module: str, out: Path, kind: str, count: int) -> None:
    argv = ["-m", module, str(out), kind]
    logs = out.parent / "logs"
    if kind == "multi_worker_mirrored":
        run_workers(argv, count, logs, limit_s=LIMIT_S)
    else:
        replicas = [str(count)] if kind == "mirrored" else []
        done = run([*argv, *replicas], logs, limit_s=LIMIT_S)
        assert done.returncode == 0, done.stderr[-6000:]


def _by_case(file: Path) -> Arrays:
    found: Arrays = {}
    with np.load(file) as archive:
        for name in archive.files:
            case, _, part = name.partition("|")
            found.setdefault(case, {})[part] = archive[name]
    return found

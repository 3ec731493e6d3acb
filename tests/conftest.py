"""Runs that several tests read: each made once, when the first test asks for it."""

from __future__ import annotations

import functools
import gc
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.launching import launched, left_in
from tests.support.processes import ONE_THREAD, at_a_time, run, run_workers

hypothesis.settings.register_profile("without a clock", deadline=None)  # others use these cores
hypothesis.settings.load_profile("without a clock")

LIMIT_S = 1200  # of one process that runs all behaviours


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-table",
        action="store_true",
        help="write the differences that tests/exactness measures to docs/",
    )


CLUSTERS = ("slurm", "mpi", "ray", "exactness", "programs")
TIERS = ("unit", "mirrored", "multiworker", "processes", "hosts", *CLUSTERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives each test without a marker of a tier the one of its folder, or `unit`."""
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in TIERS):
            folder = item.nodeid.split("/")[1]
            item.add_marker(folder if folder in TIERS else "unit")


@functools.cache
def _runs_of(path: str) -> str | None:
    """Returns a name of the runs that the tests of a file read, or None if they share none."""
    folder = path.split("/")[1]
    if folder in ("exactness", "programs"):
        return folder
    marked = re.search(r"^pytestmark = pytest.mark.(mirrored|multiworker)$", _text(path), re.M)
    return "replicas" if marked else None


def _text(path: str) -> str:
    return (Path(__file__).parents[1] / path).read_text(encoding="utf-8")


class TogetherByRuns(LoadScopeScheduling):  # type: ignore[misc]
    """Keeps together, in one of pytest-xdist's processes, the tests that read the same runs.

    The scheduler sees no markers, and pytest-xdist's own groups do not work with pytest 9.
    """

    def _split_scope(self, nodeid: str) -> str:
        return _runs_of(nodeid.partition("::")[0]) or nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TogetherByRuns:
    return TogetherByRuns(config, log)


def pytest_collection_finish() -> None:
    # The collector need not look through TensorFlow and two thousand tests each time.
    gc.freeze()


Behaved = list[dict[str, Any]]


@pytest.fixture(scope="session")
def behaviours(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Behaved]]:
    """Gives `behaviours(kind, count)`: what each worker's behaviours returned, by name.

    Those that the selected tests name as a parameter start together.
    """
    pool = ThreadPoolExecutor(at_a_time())

    def behaved(kind: str, count: int) -> Behaved:
        folder = tmp_path_factory.mktemp(f"behaviours-{kind}-{count}")
        _start("tests.support.behaviours", folder / "out_RANK.json", kind, count)
        return [json.loads(file.read_text()) for file in sorted(folder.glob("out_*.json"))]

    @functools.cache
    def started(kind: str, count: int) -> Future[Behaved]:
        return pool.submit(behaved, kind, count)

    def results(kind: str, count: int = 1) -> Behaved:
        return started(kind, count).result()

    for item in request.session.items:
        if "behaviours" in getattr(item, "fixturenames", ()):
            kind = item.callspec.params.get("kind") if hasattr(item, "callspec") else None
            if kind is not None:
                started(kind, 1 if kind == "one_device" else 2)
    yield results
    pool.shutdown(cancel_futures=True)


def _start(module: str, out: Path, kind: str, count: int) -> None:
    argv = ["-m", module, str(out), kind]
    logs = out.parent / "logs"
    if kind == "multi_worker_mirrored":
        run_workers(argv, count, logs, limit_s=LIMIT_S, env=ONE_THREAD)
    else:
        replicas = [str(count)] if kind == "mirrored" else []
        done = run([*argv, *replicas], logs, limit_s=LIMIT_S, env=ONE_THREAD)
        assert done.returncode == 0, done.stderr[-6000:]


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Returns what a run of two workers without any fault leaves."""
    folder = tmp_path_factory.mktemp("whole")
    done = launched(folder)
    assert done.returncode == 0, done.stderr
    return left_in(folder)


LIMIT_OF_THREE_S = 300
OF_THREE = [
    "sums_in_half_the_bytes",
    "gradients_in_half_the_bytes",
]


@pytest.fixture(scope="session")
def workers(
    behaviours: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], list[dict[str, Any]]]:
    """Gives `workers(count)`: what the behaviours returned on each of two or three workers."""

    @functools.cache
    def behaved(count: int) -> list[dict[str, Any]]:
        if count == 2:
            found: list[dict[str, Any]] = behaviours("multi_worker_mirrored", 2)
            return found
        folder = tmp_path_factory.mktemp("three")
        argv = ["-m", "tests.support.behaviours", str(folder / "out_RANK.json")]
        argv += ["multi_worker_mirrored", "", *OF_THREE]
        run_workers(argv, count, folder / "logs", limit_s=LIMIT_OF_THREE_S, env=ONE_THREAD)
        return [json.loads(file.read_text()) for file in sorted(folder.glob("out_*.json"))]

    return behaved

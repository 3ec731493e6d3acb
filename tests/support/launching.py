"""Starts the fault program (`chaos`) under the launcher, and reads and compares its results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from tests.support.comparing import largest_difference
from tests.support.processes import ROOT, Finished, run

LIMIT_S = 240


def argv(folder: Path, schedule: str, *flags: str) -> list[str]:
    """Returns the launcher's arguments, by default for two workers on this machine."""
    program = ["-m", "tests.support.chaos", str(folder / "out.npz"), str(folder), schedule]
    launch = ["-m", "tfmulti.launch", "--nproc-per-node", "2", "--shutdown-grace-s", "10"]
    return [*launch, "--log-dir", str(folder / "logs"), *flags, *program]


def launched(
    folder: Path, schedule: str = "", *flags: str, env: Mapping[str, str] | None = None
) -> Finished:
    """Runs the fault program under the launcher, and returns the finished process."""
    folder.mkdir(exist_ok=True)
    return run(argv(folder, schedule, *flags), folder / "launcher", env=env, limit_s=LIMIT_S)


def launch(
    folder: Path, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> Finished:
    """Runs the launcher with its logs in a folder, and returns the finished process."""
    argv = ["-m", "tfmulti.launch", "--log-dir", str(folder / "logs"), *arguments]
    return run(argv, folder / "launcher", env=env, cwd=cwd, limit_s=LIMIT_S)


def left_in(folder: Path) -> dict[str, np.ndarray]:
    """Returns the weights, optimizer, history and metrics that a run has written."""
    with np.load(folder / "out.npz") as archive:
        return {name: archive[name] for name in archive.files}


def assert_as_if_nothing_had_happened(folder: Path, whole: dict[str, np.ndarray]) -> None:
    """Checks that a run with as many workers as `whole` has its results, bit for bit."""
    found = left_in(folder)
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        assert found[name].tobytes() == value.tobytes(), name


def assert_the_same_within_rounding(folder: Path, whole: dict[str, np.ndarray]) -> None:
    """Checks the results of a run in which the number of workers has changed."""
    assert largest_difference(left_in(folder), whole) <= 1e-6


def has_checkpoint(folder: Path) -> bool:
    """Whether a run has made its first checkpoint."""
    return any((folder / "checkpoints").glob("step-*"))


def wait_for(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.05)

"""Tests that a Dataset resumes from a checkpoint on any number of workers, with few reads."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import run, run_workers
from tests.support.processes import ONE_THREAD
from tests.support.resumed_data import BATCH, EPOCHS, ROWS, STEPS

pytestmark = pytest.mark.multiworker

LAST = EPOCHS * STEPS
AT = {"ends": (*range(1, STEPS + 2), 22, 29), "repeated": (9, 16, 22)}
ELSEWHERE = (4, 14, 15, 22)
# These are the shuffle's buffer and two prefetches.
READ_AHEAD = 8 + 6 * BATCH
# In the last batches of a pass, the shuffle of finite data may have given its last row.
PREFETCHED = 5


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function that returns the workers' results. Two workers make the checkpoints."""

    @functools.cache
    def folder_of(pipeline: str) -> Path:
        return tmp_path_factory.mktemp(f"resumed-{pipeline}")

    @functools.cache
    def resumed(pipeline: str, workers: int) -> list[dict[str, Any]]:
        if workers != 2:
            resumed(pipeline, 2)
        folder = folder_of(pipeline)
        steps = [str(step) for step in (AT[pipeline] if workers == 2 else ELSEWHERE)]
        out = str(folder / f"out-{workers}-RANK.json")
        argv = ["-m", "tests.support.resumed_data", str(folder), out, pipeline, *steps]
        logs = folder / f"logs-{workers}"
        if workers == 1:
            done = run(argv, logs, limit_s=400, env=ONE_THREAD)
            assert done.returncode == 0, done.stderr[-6000:]
        else:
            run_workers(argv, workers, logs, limit_s=400, env=ONE_THREAD)
        return [json.loads(f.read_text()) for f in sorted(folder.glob(f"out-{workers}-*.json"))]

    return resumed


def given(step: int) -> int:
    """Returns the rows of the given number of steps of both epochs."""
    return step // STEPS * 2 * ROWS + step % STEPS * BATCH


@pytest.mark.parametrize("pipeline", list(AT))
def test_a_resumed_run_equals_the_run_without_a_stop(found: Any, pipeline: str) -> None:
    for worker in found(pipeline, 2):
        whole = worker["whole"]
        assert len(whole["losses"]) == LAST
        for step in AT[pipeline]:
            assert worker[str(step)]["losses"] == whole["losses"][step:]
            assert worker[str(step)]["weights"] == whole["weights"]


def most_opened(step: int) -> int:
    """Returns how many files a run from a step opens at most, if its pass is read again."""
    before = given(step) if 0 < step % STEPS < STEPS - PREFETCHED else given(step - step % STEPS)
    return EPOCHS * 2 * ROWS - before


def test_no_worker_reads_earlier_batches_again(found: Any) -> None:
    """For finite data, each file is opened as often as it occurs, and not more often."""
    for worker in found("ends", 2):
        assert worker["whole"]["opened"] == EPOCHS * 2 * ROWS
        for step in AT["ends"]:
            assert worker[str(step)]["opened"] <= most_opened(step)


def test_endless_data_is_read_only_a_little_ahead(found: Any) -> None:
    for worker in found("repeated", 2):
        for step in AT["repeated"]:
            assert worker[str(step)]["opened"] <= (LAST - step) * BATCH + READ_AHEAD


@pytest.mark.parametrize("workers", [1, 3])
def test_a_checkpoint_of_two_workers_resumes_on_other_numbers_of_workers(
    found: Any, workers: int
) -> None:
    whole = found("ends", 2)[0]["whole"]
    for worker in found("ends", workers):
        for step in ELSEWHERE:
            resumed = worker[str(step)]
            assert resumed["losses"] == pytest.approx(whole["losses"][step:], rel=1e-5)
            assert resumed["opened"] <= most_opened(step)

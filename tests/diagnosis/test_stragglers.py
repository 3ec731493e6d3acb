"""Tests that a run names the worker for which the others wait, while it goes on."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.processes import ONE_THREAD, processes, slowed, tf_config
from tfmulti import ArraySource
from tfmulti.launch.addresses import reserved
from tfmulti.run.straggler import COMPUTING, DATA, NETWORK, straggler_of

LIMIT_S = 240
ADDRESSES = ("a:1", "b:1", "c:1")


@pytest.mark.parametrize(
    ("seconds", "for_data", "for_others", "expected"),
    [
        # A worker that computes twice as long waits for nobody, and the others wait for it.
        ([10, 10, 10], [0, 0, 0], [5, 0, 5], (COMPUTING, 1, 2.0, 0.5)),
        ([10, 10, 10], [0, 4, 0], [5, 0, 5], (DATA, 1, 2.0, 0.5)),
        # All read as slowly, so it is not the data.
        ([10, 10, 10], [4, 4, 4], [5, 0, 5], (COMPUTING, 1, 2.0, 0.5)),
        ([10, 10, 10], [0, 0, 0], [6, 6, 6], (NETWORK, None, 1.0, 0.6)),
        ([10, 10, 10], [0, 0, 0], [2, 1, 2], None),
        ([10, 10], [0, 0], [5, 0], (COMPUTING, 1, 2.0, 0.5)),
        ([10, 10], [0, 0], [3, 2], None),
    ],
)
def test_times_of_the_workers_tell_who_is_slow(
    seconds: list[float], for_data: list[float], for_others: list[float], expected: Any
) -> None:
    found = straggler_of(seconds, for_data, for_others, ADDRESSES)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert (found.cause, found.worker, found.slowdown, found.share) == expected
    assert found.words()


class Slow(ArraySource):
    """Data that the second worker reads slowly."""

    def read(self, indices: np.ndarray, epoch: int = 0) -> Any:
        if '"index": 1' in os.environ["TF_CONFIG"]:
            time.sleep(0.03)
        return super().read(indices, epoch)

    def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
        if '"index": 1' in os.environ["TF_CONFIG"]:
            time.sleep(0.03)
        super().read_into(indices, epoch, out)


def rows() -> tuple[np.ndarray, np.ndarray]:
    drawn = np.random.default_rng(1).normal(size=(6400, 64)).astype(np.float32)
    return drawn, (np.arange(6400) % 3).astype(np.int32)


def slow() -> Slow:
    return Slow(rows())


def build() -> keras.Model:
    layers = [keras.layers.Dense(1024, "relu") for _ in range(3)]
    return keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(3, "softmax")])


def fitted(folder: Path, dataset: str, is_slowed: bool) -> tuple[dict[str, Any], str]:
    """Returns the report and the output of a run of two workers.

    Args:
        folder: a folder for the run.
        dataset: the function of this module that gives the data.
        is_slowed: whether the second worker runs for a part of the time only.
    """
    argv = ["-m", "tfmulti.fit", "--dataset", f"{__name__}:{dataset}", "--model"]
    argv += [f"{__name__}:build", "--global_batch_size", "128", "--epochs", "3"]
    argv += [
        "--reader_threads",
        "1",
        "--steps_per_execution",
        "1",
        "--run_dir",
        str(folder / "run"),
    ]
    with reserved(2) as addresses, processes(folder / "logs") as group:
        started = [
            group.start(argv, {"TF_CONFIG": tf_config(addresses, rank), **ONE_THREAD})
            for rank in (0, 1)
        ]
        with slowed(started[1]) if is_slowed else contextlib.nullcontext():
            done = group.wait(LIMIT_S)
        assert [each.returncode for each in done] == [0, 0], group.logs()
    return json.loads((folder / "run/report.json").read_text()), done[0].stdout


@pytest.mark.multiworker
@pytest.mark.parametrize(
    ("dataset", "is_slowed", "cause"), [("rows", True, COMPUTING), ("slow", False, DATA)]
)
def test_a_slow_worker_is_named(tmp_path: Path, dataset: str, is_slowed: bool, cause: str) -> None:
    report, output = fitted(tmp_path, dataset, is_slowed)
    found = report["straggler"]
    assert (found["worker"], found["cause"]) == (1, cause), output
    assert found["slowdown"] > 1.5
    (line,) = [line for line in output.splitlines() if line.startswith("straggler")]
    assert "worker 1 (127.0.0.1:" in line
    assert f"by {cause}" in line
    events = EventAccumulator(str(tmp_path / "run/tensorboard/train"), {"tensors": 0})
    events.Reload()
    value = events.Tensors("straggler/worker")[-1].tensor_proto
    assert int(tf.make_ndarray(value)) == 1

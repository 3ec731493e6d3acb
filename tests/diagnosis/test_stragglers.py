"""Tests that a run names the worker for which the others wait, while it goes on."""

from __future__ import annotations

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

from tests.support import networks
from tests.support.doctor import PORT, on
from tests.support.forked import Forks, run_workers
from tests.support.processes import ONE_THREAD, processes, tf_config
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


@pytest.mark.parametrize(
    ("by_worker", "worker"),
    [
        # All others wait for worker 1, which waits for all of them.
        ([[0, 5, 1], [3, 0, 3], [1, 5, 0]], 1),
        # Worker 2 waits for worker 0, so not all wait for worker 1.
        ([[0, 5, 1], [1, 0, 5], [3, 3, 0]], None),
        ([[0, 3, 3], [3, 0, 3], [3, 3, 0]], None),
        # The link of two workers belongs to both.
        ([[0, 6], [6, 0]], None),
        ([], None),
    ],
)
def test_the_last_messages_tell_whose_link_is_slow(
    by_worker: list[list[float]], worker: int | None
) -> None:
    workers = len(by_worker) or 3
    alike = [10.0] * workers, [0.0] * workers, [6.0] * workers
    found = straggler_of(*alike, ADDRESSES, by_worker)
    assert found is not None
    assert (found.cause, found.worker) == (NETWORK, worker)
    assert ("worker 1 (b:1): its link is slow" in found.words()) == (worker == 1)


class Slow(ArraySource):
    """Data that the second worker reads slowly."""

    def read(self, indices: np.ndarray, epoch: int = 0) -> Any:
        if '"index": 1' in os.environ["TF_CONFIG"]:
            time.sleep(0.1)
        return super().read(indices, epoch)

    def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
        if '"index": 1' in os.environ["TF_CONFIG"]:
            time.sleep(0.1)
        super().read_into(indices, epoch, out)


def rows() -> tuple[np.ndarray, np.ndarray]:
    drawn = np.random.default_rng(1).normal(size=(6400, 64)).astype(np.float32)
    return drawn, (np.arange(6400) % 3).astype(np.int32)


def few_rows() -> tuple[np.ndarray, np.ndarray]:
    """Half of the rows: 25 steps an epoch for a worker that takes long for each."""
    x, y = rows()
    return x[:3200], y[:3200]


def slow() -> Slow:
    return Slow(few_rows())


def slow_for_long() -> Slow:
    """The data of one long epoch."""
    return Slow(tuple(np.tile(each, (8,) + (1,) * (each.ndim - 1)) for each in rows()))


def build() -> keras.Model:
    layers = [keras.layers.Dense(1024, "relu") for _ in range(3)]
    return keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(3, "softmax")])


class Dawdles(keras.layers.Layer):
    """A layer that takes the second worker long, whatever else the machine does."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        if '"index": 1' not in os.environ["TF_CONFIG"]:
            return x

        def dawdle(values: tf.Tensor) -> tf.Tensor:
            time.sleep(0.2)
            return values

        dawdled = tf.py_function(dawdle, [x], tf.float32)
        dawdled.set_shape(x.shape)
        return dawdled


def build_small() -> keras.Model:
    layers = [keras.Input((64,)), keras.layers.Dense(64, "relu")]
    return keras.Sequential([*layers, keras.layers.Dense(3, "softmax")])


def build_slow() -> keras.Model:
    layers = [keras.Input((64,)), Dawdles(), keras.layers.Dense(64, "relu")]
    return keras.Sequential([*layers, keras.layers.Dense(3, "softmax")])


def command(folder: Path, dataset: str, model: str, *flags: str) -> list[str]:
    """Returns the arguments of a run with a dataset and a model of this module."""
    argv = ["-m", "tfmulti.fit", "--dataset", f"{__name__}:{dataset}", "--model"]
    argv += [f"{__name__}:{model}", "--reader_threads", "1", "--steps_per_execution", "1"]
    return [*argv, "--run_dir", str(folder / "run"), *flags]


def finished(folder: Path, dataset: str, model: str) -> tuple[dict[str, Any], str]:
    """Returns the report and the output of a run of two workers."""
    argv = command(folder, dataset, model, "--global_batch_size", "128", "--epochs", "2")
    done = run_workers(argv, 2, folder / "logs", limit_s=LIMIT_S, env=ONE_THREAD)
    return json.loads((folder / "run/report.json").read_text()), done[0].stdout


@pytest.mark.multiworker
@pytest.mark.parametrize(
    ("dataset", "model", "cause"),
    [("few_rows", "build_slow", COMPUTING), ("slow", "build_small", DATA)],
)
def test_a_slow_worker_is_named(tmp_path: Path, dataset: str, model: str, cause: str) -> None:
    report, output = finished(tmp_path, dataset, model)
    found = report["straggler"]
    assert (found["worker"], found["cause"]) == (1, cause), output
    assert found["slowdown"] > 1.5
    (line,) = [line for line in output.splitlines() if line.startswith("straggler")]
    assert "worker 1 (127.0.0.1:" in line
    assert f"by {cause}" in line
    events = EventAccumulator(str(tmp_path / "run/tensorboard/train"), {"tensors": 0})
    events.Reload()
    values = {
        name: float(tf.make_ndarray(events.Tensors(f"straggler/{name}")[-1].tensor_proto))
        for name in ("worker", "slowdown", "cause")
    }
    assert (values["worker"], values["cause"]) == (1, 1 + ("computing", "data").index(cause))
    assert values["slowdown"] > 1.5


@pytest.mark.multiworker
def test_a_slow_worker_is_named_within_an_epoch(tmp_path: Path) -> None:
    argv = command(tmp_path, "slow_for_long", "build_small", "--global_batch_size", "128")
    with reserved(2) as addresses, processes(tmp_path / "logs", Forks) as group:
        for rank in (0, 1):
            group.start(argv, {"TF_CONFIG": tf_config(addresses, rank), **ONE_THREAD})
        deadline = time.monotonic() + LIMIT_S
        while "\nstraggler " not in group.output(0):
            assert time.monotonic() < deadline, group.logs()
            time.sleep(0.1)
        assert "worker 1 (127.0.0.1:" in group.output(0)
        # The first epoch has not ended.
        assert not (tmp_path / "run/history.csv").exists(), group.logs()


_WHY_NOT = networks.why_not()


@pytest.mark.hosts
@pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))
@pytest.mark.parametrize(
    ("workers", "slow", "named"), [(2, (1, 2), None), (3, (2,), 1)], ids=["all", "one"]
)
def test_a_slow_network_is_named(
    tmp_path: Path, workers: int, slow: tuple[int, ...], named: int | None
) -> None:
    (tmp_path / "hosts").mkdir()
    limit = ["rate", "50mbit", "burst", "64kbit", "latency", "400ms"]
    argv = command(tmp_path, "rows", "build", "--global_batch_size", "516", "--epochs", "1")
    with (
        networks.hosts(workers, tmp_path / "hosts") as hosts,
        processes(tmp_path / "logs") as group,
    ):
        for host in slow:
            on(hosts, host, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
        addresses = [f"{hosts.address(host)}:{PORT}" for host in range(1, workers + 1)]
        for rank in range(workers):
            env = {"TF_CONFIG": tf_config(addresses, rank), **ONE_THREAD}
            group.start(argv, env, before=hosts.inside(rank + 1))
        done = group.wait(LIMIT_S)
    assert [each.returncode for each in done] == [0] * workers, done[0].stderr
    found = json.loads((tmp_path / "run/report.json").read_text())["straggler"]
    assert (found["cause"], found["worker"]) == (NETWORK, named), done[0].stdout
    assert "all workers wait for messages for" in done[0].stdout
    where = f"worker 1 ({hosts.address(2)}:{PORT}): its link is slow"
    assert (where in done[0].stdout) == (named == 1)

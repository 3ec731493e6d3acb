"""Tests how `Throughput` counts examples, steps and operations, with a clock of the tests."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tfmulti import FitConfig, Throughput, make_strategy, prepare
from tfmulti.distribution.strategies import Placement
from tfmulti.errors import ConfigError, ModelError
from tfmulti.run.callbacks import throughput as module
from tfmulti.run.train import train

pytestmark = pytest.mark.mirrored

X = np.zeros((50, 4), np.float32)


def model(*, steps_per_execution: int = 1, eager: bool = False) -> keras.Model:
    with make_strategy("one_device").scope():
        made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, use_bias=False)])
        prepare(made, seed=1)
        made.compile("sgd", "mse", steps_per_execution=steps_per_execution, run_eagerly=eager)
    return made


def ticks() -> Iterator[float]:
    """A clock that advances by a second with each reading."""
    return map(float, itertools.count())


class Seen(keras.callbacks.Callback):
    """A callback that records the logs that it gets after `Throughput`."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[dict[str, Any]] = []
        self.epochs: list[dict[str, Any]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches.append(dict(logs))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(dict(logs))


def trained(made: keras.Model, epochs: int = 2, **options: Any) -> tuple[Throughput, Seen]:
    found, seen = Throughput(clock=ticks().__next__, **options), Seen()
    made.fit(
        X, X[:, :3], batch_size=8, epochs=epochs, verbose=0, shuffle=False, callbacks=[found, seen]
    )
    return found, seen


def test_whole_executions_count_and_traces_do_not() -> None:
    """An epoch has seven steps, of 8, 8, … and 2 rows. The very first step is traced."""
    found, _ = trained(model())
    # The clock is read twice for each step, at its begin and at its end, where the next one starts.
    assert (found.examples, found.steps) == (42 + 50, 13)
    assert found.seconds == 2 * 13
    assert found.executing_s == 13
    assert found.first_s == 1
    figures = found.figures()
    assert figures["examples_per_sec"] == 92 / 26
    assert figures["device_examples_per_sec"] == 92 / 26
    assert [figures[f"step_ms_p{p}"] for p in (50, 90, 99)] == [2000, 2000, 2000]


def test_time_between_epochs_does_not_count() -> None:
    clock = ticks()
    idle = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: [next(clock) for _ in range(99)])
    found = Throughput(clock=clock.__next__)
    model().fit(X, X[:, :3], batch_size=8, epochs=2, verbose=0, callbacks=[found, idle])
    assert (found.steps, found.seconds) == (13, 26)


def test_executions_of_several_steps() -> None:
    """An epoch has executions of 3, 3 and 1 steps, by two functions that are each traced once."""
    found, _ = trained(model(steps_per_execution=3))
    assert (found.examples, found.steps) == (24 + 24 + 24 + 2, 3 + 3 + 3 + 1)
    assert found.seconds == 4 * 2
    figures = found.figures()
    assert figures["step_ms_p50"] == pytest.approx(2000 / 3)
    assert figures["step_ms_p90"] == pytest.approx(2000 / 3)
    assert figures["step_ms_p99"] == 2000


def test_eager_steps_are_never_traced() -> None:
    found, _ = trained(model(eager=True))
    assert (found.examples, found.steps) == (42 + 50, 13)


def test_a_second_fit_leaves_its_first_execution_out() -> None:
    made = model()
    trained(made)
    found, _ = trained(made, epochs=1)
    assert (found.examples, found.steps) == (42, 6)


def test_logs_have_the_figures_of_the_epoch_so_far() -> None:
    made = model()
    found, seen = trained(made, peak_tflops=1e-6)
    # The first step was traced, so no figure is known yet.
    assert not set(module.LOGS) & set(seen.batches[0])
    for logs in (seen.batches[1], seen.batches[-1], *seen.epochs):
        assert set(module.LOGS) <= set(logs)
    assert seen.batches[1]["examples_per_sec"] == 8 / 2
    assert seen.epochs[1]["examples_per_sec"] == 50 / 14
    # The model is one product of 4 × 3. The backward pass counts as two forward passes.
    flops = 3 * (2 * 4 * 3)
    assert found.flops_per_example == flops
    assert seen.epochs[1]["device_tflops_per_sec"] == pytest.approx(50 / 14 * flops / 1e12)
    assert seen.epochs[1]["mfu"] == pytest.approx(50 / 14 * flops / 1e6)
    assert set(module.LOGS) <= set(made.history.history)


def test_without_the_flag_nothing_is_added_or_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "training_flops", None)
    found, seen = trained(model(), in_logs=False)
    assert not set(module.LOGS) & {*seen.batches[-1], *seen.epochs[-1]}
    assert len(found.times) == 0
    assert set(found.figures()) == {
        *("examples", "steps", "seconds"),
        *("examples_per_sec", "device_examples_per_sec"),
    }


def test_cpus_have_no_utilisation() -> None:
    found, _ = trained(model())
    assert "device_tflops_per_sec" in found.figures()
    assert "mfu" not in found.figures()
    assert "peak_tflops" not in found.figures()


def test_the_chief_alone_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "placement_of", lambda strategy: Placement(1, 2, 1))
    trained(model(), folder=tmp_path / "events")
    assert not (tmp_path / "events").exists()


def test_a_model_that_is_not_prepared_is_refused() -> None:
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    with pytest.raises(ModelError, match=r"Give prepare\(model\) this Sequential before fit"):
        made.fit(X, X[:, :1], verbose=0, callbacks=[Throughput()])
    with pytest.raises(ConfigError, match=r"Throughput\(peak_tflops=0\) must be above 0"):
        Throughput(peak_tflops=0)


def test_a_run_reports_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same: dict[str, Any] = {"epochs": 2, "steps_per_execution": 1}
    config = FitConfig(
        log_throughput=True, peak_tflops=0.5, run_dir=str(tmp_path / "r"), verbose="2", **same
    )
    report = train(config)
    plain = train(FitConfig(run_dir=str(tmp_path / "p"), verbose="0", **same))
    assert report.weights_sha256 == plain.weights_sha256
    assert report.history == plain.history
    assert plain.throughput is None
    saved = json.loads((tmp_path / "r" / "report.json").read_text())["throughput"]
    assert saved == report.throughput
    # The first step does not count.
    assert saved["examples"] == 2 * 1197 - 64
    assert saved["steps"] == 2 * 19 - 1
    assert saved["examples_per_sec"] == pytest.approx(saved["examples"] / saved["seconds"])
    assert saved["examples_per_sec"] == report.examples_per_second
    assert 0 < saved["step_ms_p50"] <= saved["step_ms_p90"] <= saved["step_ms_p99"]
    rate = saved["examples_per_sec"] * saved["flops_per_example"] / 1e12
    assert saved["device_tflops_per_sec"] == pytest.approx(rate)
    assert saved["mfu"] == pytest.approx(rate / 0.5)
    assert not set(module.LOGS) & {*report.history, *report.metrics}
    assert "examples_per_sec" not in (tmp_path / "r" / "history.csv").read_text()
    shown = capsys.readouterr().out
    assert "- device_examples_per_sec: " in shown
    assert "examples/s on each device; a step takes" in shown
    assert "% of its peak" in shown
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "r" / "tensorboard" / "train"))
    events.Reload()
    assert {
        *("throughput/examples_per_sec", "throughput/device/examples_per_sec"),
        *("throughput/step_ms_p50", "throughput/step_ms_p90", "throughput/step_ms_p99"),
        *("throughput/device/tflops_per_sec", "throughput/mfu", "throughput/steps_per_sec"),
    } <= set(events.Tags()["tensors"])
    assert len(events.Tensors("throughput/mfu")) == 2

"""Tests the run's own callbacks, with a clock that the tests set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tfmulti.run.callbacks.model_file import ModelFile
from tfmulti.run.callbacks.tensorboard import TensorBoard

pytestmark = pytest.mark.mirrored


class StepClock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class SlowToSave:
    """A stand-in for a model. Saving it takes `seconds` of the clock."""

    def __init__(self, clock: StepClock, seconds: float) -> None:
        self.clock, self.seconds, self.saves = clock, seconds, 0

    def save(self, path: Path) -> None:
        self.saves += 1
        self.clock.now += self.seconds
        Path(path).write_text("model")


@pytest.mark.parametrize(("seconds", "saves"), [(0.1, 10), (2.0, 2)])
def test_the_model_is_saved_at_intervals(tmp_path: Path, seconds: float, saves: int) -> None:
    """Epochs take 3 s. Every second one saves, or one every 40 s if saving takes 2 s."""
    clock = StepClock()
    model = SlowToSave(clock, seconds)
    callback = ModelFile(tmp_path / "model.keras", clock)
    callback.set_model(model)
    for epoch in range(20):
        clock.now += 3.0
        callback.on_epoch_end(epoch)
    assert model.saves == saves
    assert [path.name for path in tmp_path.iterdir()] == ["model.keras"]


def test_a_short_run_saves_only_at_its_end(tmp_path: Path) -> None:
    clock = StepClock()
    callback = ModelFile(tmp_path / "model.keras", clock)
    callback.set_model(SlowToSave(clock, 0.1))
    callback.on_epoch_end(0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["on_epoch_end", "on_train_batch_end"])
def test_vectors_do_not_reach_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        f"keras.callbacks.TensorBoard.{method}", lambda self, number, logs: seen.append(logs)
    )
    getattr(TensorBoard(tmp_path), method)(0, {"loss": 1.0, "f1": np.array([0.5, 0.5])})
    assert seen == [{"loss": 1.0}]

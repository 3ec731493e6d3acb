"""Tests that states of callbacks are saved and restored, or named in one line if they cannot be."""

from __future__ import annotations

import enum
from collections import Counter, defaultdict, deque
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tfmulti import Checkpoint, prepare
from tfmulti.training.checkpoint import file_format
from tfmulti.training.checkpoint.callback_states import CallbackStates

pytestmark = pytest.mark.mirrored


class Mode(enum.IntEnum):
    WARM = 1
    HOT = 2


class Own(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.by_step: dict[Any, Any] = {}
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.seen: Counter[str] = Counter()
        self.last: deque[float] = deque(maxlen=2)
        self.mode = Mode.WARM
        self.pair: Any = None

    def learn(self) -> None:
        self.by_step |= {3: (1, 2), (0, "a"): {4, 5}, np.int64(7): b"x"}
        self.counts["a"] += 2
        self.seen["b"] += 3
        self.last.extend([1.0, 2.0, 3.0])
        self.mode = Mode.HOT
        self.pair = (np.float32(0.5), None)


class Speaks(keras.callbacks.Callback):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


class Holds(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.wiring = {"never": object()}
        self.count = 0
        self.found: list[Any] = []


def through_a_file(states: Any) -> Any:
    record = file_format.Record(1, {"callbacks": states})
    return file_format.from_bytes(file_format.to_bytes(record)).tree["callbacks"]


def test_attributes_are_restored_with_their_keys_and_classes() -> None:
    before, after = Own(), Own()
    states = CallbackStates([before])
    before.learn()
    saved = through_a_file(states.capture())
    CallbackStates([after]).restore(saved)
    mine, there = ({k: v for k, v in vars(c).items() if "model" not in k} for c in (before, after))
    assert mine == there
    assert [type(v) for v in mine.values()] == [type(v) for v in there.values()]
    assert [type(v) for v in before.pair] == [type(v) for v in after.pair]
    assert (states.left_out, after.last.maxlen, after.counts["new"]) == ([], 2, 0)


def test_the_result_of_get_state_is_copied_and_restored() -> None:
    before, after = Speaks({1: [1], "a": (2, {3})}), Speaks(None)
    saved = CallbackStates([before]).capture()
    # Training may change the state while the checkpoint is written.
    before.state[1].append(2)
    CallbackStates([after]).restore(through_a_file(saved))
    assert after.state == {1: [1], "a": (2, {3})}


def test_attributes_that_cannot_be_saved_are_named_and_the_rest_is_saved() -> None:
    speaks, holds = Speaks({"a": [0, object()]}), Holds()
    states = CallbackStates([speaks, holds])
    holds.count = 5
    holds.found.append(np.array([object()]))
    saved = through_a_file(states.capture())
    assert [line.partition(";")[0] for line in states.left_out] == [
        "the state of the callback Speaks is not in the checkpoints, since get_state()['a'][1] is "
        "a "
        "object",
        "the attribute 'found' of the callback Holds is not in the checkpoints, since found[0] is "
        "a "
        "NumPy array of object",
    ]
    fresh = Holds()
    CallbackStates([Speaks(1), fresh]).restore(saved)
    assert (fresh.count, fresh.found) == (5, [])


def test_training_goes_on_with_one_line_and_checkpoints(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = prepare(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    model.compile("sgd", "mse")
    model.fit(
        np.ones((8, 2)),
        np.ones((8, 1)),
        batch_size=2,
        verbose=0,
        callbacks=[Speaks({(1, 2): object()}), Checkpoint(tmp_path, every_steps=1)],
    )
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("tfmulti:")]
    assert len(said) == 1
    assert "the callback Speaks" in said[0]
    assert "get_state()[(1, 2)] is a object" in said[0]
    assert (tmp_path / "step-000000004.npz").is_file()


class Draws(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        np.random.random()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.found.append(np.random.random())


def test_what_a_callback_draws_before_an_epoch_is_not_drawn_twice(tmp_path: Path) -> None:
    def fitted(folder: Path, epochs: int) -> list[float]:
        keras.utils.set_random_seed(3)
        model = prepare(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
        model.compile("sgd", "mse")
        draws, checkpoint = Draws(), Checkpoint(folder)
        x, y = np.ones((8, 2)), np.ones((8, 1))
        model.fit(x, y, 4, epochs, verbose=0, callbacks=[draws, checkpoint])
        return draws.found

    whole = fitted(tmp_path / "whole", 2)
    fitted(tmp_path / "stopped", 1)
    assert fitted(tmp_path / "stopped", 2) == whole

"""Tests that epochs end, and that the data begins again, where they do in plain Keras."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmulti import prepare
from tfmulti.distribution.strategies import Placement
from tfmulti.launch import heartbeat
from tfmulti.training.input.feed import DataArguments, make_feed

pytestmark = pytest.mark.mirrored

X = np.arange(24, dtype=np.float32).reshape(12, 2) / 24
Y = X.sum(1, keepdims=True)


class Steps(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.epochs[-1] += 1


def small_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("steps", [2, 3])
def test_data_that_ends_with_an_epoch_begins_again(steps: int) -> None:
    results = []
    for model in (small_model(), prepare(small_model())):
        steps_counter = Steps()
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
        with warnings.catch_warnings():
            # Keras warns, because the second epoch has only one of its two steps.
            warnings.simplefilter("ignore")
            history = model.fit(
                data, epochs=4, steps_per_epoch=steps, verbose=0, callbacks=[steps_counter]
            ).history
        results.append((steps_counter.epochs, history["loss"]))
    assert results[1][0] == results[0][0]
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-6)


class Noted(keras.utils.PyDataset):
    def __init__(self, count: int | None) -> None:
        super().__init__()
        self.count, self.ends, self.read = count, 0, []

    @property
    def num_batches(self) -> int | None:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return X[:4], Y[:4]

    def on_epoch_end(self) -> None:
        self.ends += 1


class Rolled(keras.utils.PyDataset):
    """Has five batches. After each end of an epoch, another batch comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.order = [0, 1, 2, 0, 1]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Any:
        at = 4 * self.order[index]
        return X[at : at + 4], Y[at : at + 4]

    def on_epoch_end(self) -> None:
        self.order = [*self.order[1:], self.order[0]]


def test_a_pydataset_that_changes_its_order_gives_that_of_plain_keras() -> None:
    """Keras calls `on_epoch_end` also before the first epoch and before each evaluation."""
    results = []
    for model in (small_model(), prepare(small_model())):
        losses: list[float] = []

        def note(batch: int, logs: Any, losses: list[float] = losses) -> None:
            # This is the mean over the batches of the epoch so far.
            losses.append(logs["loss"])

        recorder = keras.callbacks.LambdaCallback(on_train_batch_end=note)
        recorder.on_test_batch_end = note
        data, validation = Rolled(), Rolled()
        model.fit(
            data,
            validation_data=validation,
            epochs=3,
            shuffle=False,
            verbose=0,
            callbacks=[recorder],
        )
        model.fit(data, shuffle=False, verbose=0, callbacks=[recorder])
        model.evaluate(validation, verbose=0, callbacks=[recorder])
        outputs = model.predict(validation, verbose=0)
        results.append((losses, outputs, data.order, validation.order))
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-6)
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=1e-6)
    assert results[1][2:] == results[0][2:]


@pytest.mark.parametrize(("method", "ends"), [("fit", 3), ("evaluate", 4), ("predict", 2)])
def test_a_pydataset_that_changes_its_order_resumes_in_it(method: Any, ends: int) -> None:
    """All passes of training are one call, and each evaluation is a separate call."""
    data, again, plain = Rolled(), Rolled(), Rolled()
    feed = make_feed(DataArguments(data), Placement(0, 1, 1), method=method)
    for _ in range(2):
        feed.take(0, 1)
        feed.end_pass(complete=True)
    for _ in range(ends):
        plain.on_epoch_end()
    assert data.order == plain.order
    resumed = make_feed(DataArguments(again), Placement(0, 1, 1), method=method)
    resumed.set_state(feed.get_state(0))
    assert again.order == data.order != Rolled().order


@pytest.mark.parametrize(("count", "ends"), [(None, 4), (6, 2), (3, 4)])
def test_on_epoch_end_of_a_pydataset_is_called(count: int | None, ends: int) -> None:
    """The end of each epoch counts if the data has no end, and otherwise the end of each pass."""
    data = Noted(count)
    prepare(small_model()).fit(data, epochs=4, steps_per_epoch=3, verbose=0)
    # Keras makes one call at the beginning.
    assert data.ends - 1 == ends
    if count is not None:
        passes = data.read[-(12 // count) * count :]
        assert {i: passes.count(i) for i in passes} == dict.fromkeys(range(count), 12 // count)


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_each_trace_of_an_execution_is_reported(
    monkeypatch: pytest.MonkeyPatch, steps_per_execution: int
) -> None:
    """Otherwise a trace of a minute would count as a hanging step among steps of a millisecond."""
    traces: list[int] = []
    monkeypatch.setattr(heartbeat.Heartbeat, "tracing", lambda self: traces.append(1))
    model = prepare(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), seed=1)
    model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    x = np.zeros((24, 4), np.float32)
    model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
    first = len(traces)
    assert first >= 1
    model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
    assert len(traces) == first
    model.evaluate(x, x[:, :1], batch_size=4, verbose=0)
    assert len(traces) > first

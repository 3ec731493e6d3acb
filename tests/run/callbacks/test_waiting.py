"""Tests that waiting for data is measured in the compiled step, logged, and explained."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmulti import make_strategy, prepare
from tfmulti.data.advice import advice
from tfmulti.data.arrays import ArraySource
from tfmulti.run.callbacks.waiting import Waiting
from tfmulti.training.state.trainer_state import state_of

pytestmark = pytest.mark.mirrored


class Slow(ArraySource):
    """A source whose reads are always slow."""

    pause_s = 0.05

    def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
        time.sleep(self.pause_s)
        super().read_into(indices, epoch, out)


class Busy(keras.layers.Layer):
    """A layer whose computing is slow."""

    def call(self, inputs: Any) -> Any:
        value = tf.ones((600, 600)) + inputs[0, 0] * 0
        for _ in range(40):
            value = tf.matmul(value, value) * 1e-6
        return inputs + value[0, 0] * 0


def model(*layers: Any, steps_per_execution: int = 1, **options: Any) -> keras.Model:
    with make_strategy("one_device").scope():
        made = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        prepare(made, seed=1, **options)
        made.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    return made


X = np.zeros((48, 4), np.float32)


def share(made: keras.Model, data: Any, **options: Any) -> float:
    made.fit(data, epochs=2, verbose=0, **options)
    state = state_of(made)
    return state.epoch.waited_s / state.epoch.seconds


@pytest.mark.parametrize("steps", [1, 4])
def test_slow_data_is_waited_for(steps: int) -> None:
    made = model(steps_per_execution=steps, reader_threads=0)
    assert share(made, Slow((X, X[:, :1])), batch_size=4) > 0.7


@pytest.mark.parametrize("steps", [1, 4])
def test_reading_while_a_step_runs_is_no_waiting(steps: int) -> None:
    """TensorFlow takes the next batch of a loop early, while the step computes."""
    made = model(Busy(), steps_per_execution=steps, reader_threads=0)
    data = Slow((X, X[:, :1]))
    data.pause_s = 0.0
    assert share(made, data, batch_size=4) < 0.3


def test_a_slow_dataset_is_waited_for_too() -> None:
    def batches() -> Any:
        for start in range(0, 48, 4):
            time.sleep(0.05)
            yield X[start : start + 4], X[start : start + 4, :1]

    form = tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([None, 1], tf.float32)
    unknown = tf.data.Dataset.from_generator(batches, output_signature=form)
    # If the length is not known, the batch is taken outside of the step.
    assert share(model(), unknown) > 0.7
    known = unknown.apply(tf.data.experimental.assert_cardinality(12))
    assert share(model(), known) > 0.7


def test_waiting_is_logged_and_reported(tmp_path: Path) -> None:
    said: list[str] = []
    waiting = Waiting(tmp_path, lambda label, words: said.append(f"{label}: {words}"))
    made = model(reader_threads=0)
    made.fit(Slow((X, X[:, :1])), batch_size=4, epochs=2, verbose=0, callbacks=[waiting])
    assert waiting.share > 0.7
    assert len(said) == 2
    assert all(line.startswith("waiting: input-bound: ") for line in said)
    (file,) = tmp_path.glob("events*")
    values = [
        tf.make_ndarray(value.tensor)
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
        if value.tag == "data/waiting_share"
    ]
    assert len(values) == 2
    assert all(0.5 < value <= 1 for value in values)


def test_little_waiting_is_not_reported() -> None:
    said: list[str] = []
    waiting = Waiting(None, lambda label, words: said.append(words))
    made = model(Busy())
    made.fit(X, X[:, :1], batch_size=4, epochs=2, verbose=0, callbacks=[waiting])
    assert waiting.share < 0.1
    assert not said


@pytest.mark.parametrize(
    ("threads", "cached", "words"),
    [
        (0, False, "try --reader_threads 4"),
        (2, True, "try --reader_threads 4"),
        (4, False, "try --cache memory, or --cache disk"),
        (4, True, "reading takes all cores"),
        (None, False, "give a Dataset num_parallel_calls"),
    ],
)
def test_advice_against_waiting(threads: int | None, cached: bool, words: str) -> None:
    said = advice(0.614, threads, cached=cached, cores=4)
    assert said.startswith("input-bound: 61 % of the step is waiting for data; ")
    assert words in said


def test_no_thread_outlives_fit_evaluate_and_predict() -> None:
    made = model(reader_threads=2)
    before = set(threading.enumerate())
    data = Slow((X, X[:, :1]))
    data.pause_s = 0.0
    made.fit(data, batch_size=4, epochs=2, verbose=0, validation_data=data)
    made.evaluate(data, batch_size=5, verbose=0)
    made.predict(data, batch_size=5, verbose=0)
    with pytest.raises(RuntimeError, match="on purpose"):
        made.fit(data, batch_size=4, verbose=0, callbacks=[Fails()])
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("tfmulti")]


def test_more_steps_than_batches_read_each_row_once() -> None:
    made = model()
    with pytest.warns(UserWarning, match="ended after 12 of 20 steps"):
        assert len(made.predict(X, batch_size=4, steps=20, verbose=0)) == 48
    with pytest.warns(UserWarning, match="ended after 12 of 20 steps"):
        made.evaluate(X, X[:, :1], batch_size=4, steps=20, verbose=0)


class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        raise RuntimeError("on purpose")

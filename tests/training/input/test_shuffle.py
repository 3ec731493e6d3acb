"""Tests that `fit` reads arrays in the order of plain Keras where a seed of TensorFlow is set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmulti import Checkpoint, prepare
from tfmulti.distribution.strategies import make_strategy

ROWS = 37
X = np.arange(ROWS, dtype=np.float32)[:, None]


@pytest.fixture(autouse=True)
def _without_a_seed() -> Iterator[None]:
    yield
    # Other tests set the seed that they need.
    tf.random.set_seed(None)  # type: ignore[arg-type]


def weights_of_steps(model: keras.Model, **options: Any) -> np.ndarray:
    """Returns the weight after each step, which tells the rows of the batch."""
    weights: list[float] = []
    recorder = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: weights.append(float(model.get_weights()[0][0, 0]))
    )
    model.set_weights([np.zeros((1, 1), np.float32)])
    model.fit(X, X, verbose=0, callbacks=[recorder], epochs=3, **options)
    return np.array(weights)


def new_model() -> keras.Model:
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    return keras.Sequential([keras.Input((1,)), layer])


def both(seed: int | None, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    weights = []
    # With a strategy, plain Keras reads through TensorFlow's MultiDeviceIterator. Its background
    # thread may still read when the iterator is deleted, which ends the process (TensorFlow 2.21).
    for scope in (contextlib.nullcontext(), make_strategy("one_device").scope()):
        if seed is not None:
            keras.utils.set_random_seed(seed)
        with scope:
            model = new_model() if not weights else prepare(new_model())
            model.compile(keras.optimizers.SGD(1e-5), "mse")
        keras.random.normal((2,))
        weights.append(weights_of_steps(model, **options))
    return weights[0], weights[1]


@pytest.mark.parametrize("seed", [0, 7, 2**31])
@pytest.mark.parametrize("options", [{}, {"shuffle": "batch"}, {"validation_split": 0.3}])
def test_arrays_have_the_order_of_plain_keras(seed: int, options: dict[str, Any]) -> None:
    plain, prepared = both(seed, batch_size=8, **options)
    np.testing.assert_allclose(prepared, plain, rtol=2e-6)


def test_another_order_would_be_seen() -> None:
    plain, _ = both(7, batch_size=8)
    other, _ = both(8, batch_size=8)
    assert np.abs(plain / other - 1).max() > 1e-3


def test_a_seed_of_prepare_gives_each_epoch_its_own_order() -> None:
    keras.utils.set_random_seed(7)
    with make_strategy("one_device").scope():
        model = prepare(new_model(), seed=3)
        model.compile(keras.optimizers.SGD(0.0), "mse")
    losses = []
    recorder = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(logs["loss"])
    )
    model.fit(X, X, batch_size=8, epochs=2, verbose=0, callbacks=[recorder])
    assert losses[:4] != losses[5:9]


def trained(seed: int | None, folder: Path, epochs: int) -> np.ndarray:
    """Trains or resumes until an epoch has ended, and returns the weights."""
    tf.random.set_seed(seed)  # type: ignore[arg-type]
    with make_strategy("one_device").scope():
        model = prepare(new_model())
        model.compile(keras.optimizers.SGD(1e-5), "mse")
    model.fit(X, X, batch_size=8, epochs=epochs, verbose=0, callbacks=[Checkpoint(folder)])
    return np.asarray(model.get_weights()[0])


@pytest.mark.parametrize(("first", "then"), [(7, 8), (7, None), (None, 7)])
def test_a_resumed_run_keeps_its_order(tmp_path: Path, first: int | None, then: int | None) -> None:
    whole = trained(first, tmp_path / "whole", 2)
    trained(first, tmp_path / "stopped", 1)
    assert np.array_equal(trained(then, tmp_path / "stopped", 2), whole)

"""Tests the data that a user's function may return, and the errors for all other values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmulti import prepare
from tfmulti.data.sources import user
from tfmulti.errors import DataError, ModelError
from tfmulti.run.models import user as user_model

pytestmark = pytest.mark.mirrored

X, Y = np.zeros((6, 2), np.float32), np.arange(6) % 2


def of_size(global_batch_size: int, **options: Any) -> Any:
    return X[:global_batch_size], Y[:global_batch_size]


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (lambda: (X, Y), (6, None, None)),
        (lambda: ((X, Y), None), (6, None, None)),
        (lambda: ((X, Y), None, (X[:3], Y[:3])), (6, None, 3)),
        (lambda: {"train": (X, Y, Y), "validation": (X[:2], Y[:2])}, (6, 2, None)),
        (of_size, (4, None, None)),
    ],
)
def test_parts(function: Callable[..., Any], parts: tuple[int | None, ...]) -> None:
    data = user.load("mine:data", function, 4)
    found = (data.train, data.validation, data.test)
    assert tuple(None if part is None else len(part) for part in found) == parts


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: None, "mine:data returned None for the training data. Return"),
        (lambda: (None, (X, Y)), "returned None for the training data"),
        (lambda: {"train": None}, "returned None for the training data"),
        (lambda: 3, "returned a int. Return arrays"),
        (lambda: {"x": X}, "returned a dict. Return arrays"),
        (lambda: (X,), "returned 1 items"),
        (lambda folder, global_batch_size: None, "needs the arguments folder, global_batch_size"),
        (lambda: (X[:0], Y[:0]), "the data has no rows"),
    ],
)
def test_mistakes(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        user.load("mine:data", function, 4)


def test_labels_without_a_class_are_errors() -> None:
    values = Y.astype(np.float32) - 1
    for fine in ((X, Y), ((X, Y), (X, Y)), (X, values)):
        user.check_labels("mine:data", user.load("mine:data", lambda fine=fine: fine, 4))
    for bad, words in (
        ((X, Y - 1), r"y of the train part is -1 in row 0, .* 0\.\.1 as in"),
        (((X, Y), (X[:3], Y[:3] + 1)), "y of the validation part is 2 in row 1"),
    ):
        data = user.load("mine:data", lambda bad=bad: bad, 4)
        with pytest.raises(DataError, match=f"^--dataset mine:data: {words}"):
            user.check_labels("mine:data", data)


class Ten(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return {"a": np.zeros((10, 2))}, np.zeros(10)


@pytest.mark.parametrize(
    ("train", "rows"),
    [
        (Ten(), 10),
        (tf.data.Dataset.range(8).batch(4, drop_remainder=True), 4),
        (tf.data.Dataset.range(8).batch(4), None),
        ((X, Y), None),
    ],
)
def test_the_batch_size_of_users_batches_is_found(train: Any, rows: int | None) -> None:
    assert user.rows_of_batches(train) == rows


def ending_in(*layers: keras.layers.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((2,)), *layers])


@pytest.mark.parametrize(
    ("layers", "logits"),
    [
        ([keras.layers.Dense(3)], True),
        ([keras.layers.Dense(3), keras.layers.Activation("linear")], True),
        ([keras.layers.Dense(3, "softmax")], False),
        ([keras.layers.Dense(3), keras.layers.Softmax()], False),
        ([keras.layers.Dense(3), keras.layers.Activation("softmax")], False),
        ([keras.layers.Dense(3, "softmax"), keras.layers.Activation("linear")], False),
    ],
)
def test_the_last_layers_decide_whether_outputs_are_logits(layers: Any, logits: bool) -> None:
    assert user_model.ends_in_logits("mine:model", ending_in(*layers)) is logits


@pytest.mark.parametrize(
    "layers",
    [[keras.layers.Dense(3, "sigmoid")], [keras.layers.Dense(3), keras.layers.Dropout(0.1)]],
)
def test_a_model_with_unclear_outputs_is_refused(layers: Any) -> None:
    with pytest.raises(ModelError, match=r"does not tell .* Call model.compile\(optimizer, loss\)"):
        user_model.ends_in_logits("mine:model", ending_in(*layers))
    with pytest.raises(ModelError, match=r"its layers do not tell"):
        user_model.ends_in_logits("mine:model", keras.Model())


class Noting(keras.Model):
    """Records the types that its steps get."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.types: list[str] = []

    def train_step(self, data: Any) -> Any:
        self.types += [part.dtype.name for part in data]
        return super().train_step(data)

    def test_step(self, data: Any) -> Any:
        self.types += [part.dtype.name for part in data]
        return super().test_step(data)


@pytest.mark.parametrize("floatx", ["float32", "float64"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
def test_arrays_have_the_types_of_plain_keras(floatx: str, dtype: str) -> None:
    x = np.random.default_rng(1).random((12, 3)).astype(dtype)
    y = np.random.default_rng(2).random((12, 1))
    found = []
    before = keras.config.floatx()
    keras.config.set_floatx(floatx)
    try:
        for prepared in (False, True):
            keras.utils.set_random_seed(1)
            inputs = keras.Input((3,))
            model = Noting(inputs, keras.layers.Dense(1)(inputs))
            if prepared:
                prepare(model)
            model.compile("adam", "mse")
            given = {"batch_size": 4, "verbose": 0}
            history = model.fit(x, y, shuffle=False, validation_data=(x, y), **given).history
            predicted = model.predict(x, **given)
            found.append((sorted(set(model.types)), history, predicted.dtype, predicted.tolist()))
    finally:
        keras.config.set_floatx(before)
    assert found[0] == found[1]

"""Tests the data that a user's function may return, and the errors for all other values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmulti.data.sources import user
from tfmulti.errors import DataError

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
    loaded = (data.train, data.validation, data.test)
    assert tuple(None if part is None else len(part) for part in loaded) == parts


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
    for bad, message in (
        ((X, Y - 1), r"y of the train part is -1 in row 0, .* 0\.\.1 as in"),
        (((X, Y), (X[:3], Y[:3] + 1)), "y of the validation part is 2 in row 1"),
    ):
        data = user.load("mine:data", lambda bad=bad: bad, 4)
        with pytest.raises(DataError, match=f"^--dataset mine:data: {message}"):
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

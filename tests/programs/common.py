"""Small data and models that the programs share."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

# The last batch has 14 rows, and three replicas have different numbers of rows.
ROWS, BATCH = 30, 16
CLASSES = 3


def rng() -> np.random.Generator:
    """Returns a generator of a program's data, the same for each program."""
    return np.random.default_rng(11)


def features(*shape: int, rows: int = ROWS) -> np.ndarray:
    """Returns `[rows, *shape]` numbers. The rows differ in magnitude."""
    found = rng().standard_normal((rows, *shape)) * np.linspace(0.5, 1.5, rows).reshape(
        (rows,) + (1,) * len(shape)
    )
    return found.astype("float32")


def labels(rows: int = ROWS, classes: int = CLASSES) -> np.ndarray:
    """Returns `[rows]` classes."""
    return np.random.default_rng(12).integers(0, classes, rows).astype("int32")


def images(size: int = 6, channels: int = 1, rows: int = ROWS) -> np.ndarray:
    """Returns `[rows, size, size, channels]` numbers between 0 and 1."""
    return rng().random((rows, size, size, channels)).astype("float32")


def tokens(length: int = 6, vocabulary: int = 9, rows: int = ROWS) -> np.ndarray:
    """Returns `[rows, length]` tokens, padded with 0 at the end to unequal lengths."""
    generator = np.random.default_rng(13)
    found = generator.integers(1, vocabulary, (rows, length))
    lengths = generator.integers(2, length + 1, rows)
    return np.where(np.arange(length) < lengths[:, None], found, 0).astype("int32")


def batches(*arrays: Any, batch: int = BATCH) -> tf.data.Dataset:
    """Returns a Dataset of batches, which are tuples, or arrays if there is only one array."""
    given = arrays if len(arrays) > 1 else arrays[0]
    return tf.data.Dataset.from_tensor_slices(given).batch(batch)


def fit(x: Any = None, y: Any = None, **more: Any) -> dict[str, Any]:
    """Returns arguments of `fit`: two epochs in the order of the data."""
    given: dict[str, Any] = {"x": x, "epochs": 2, "shuffle": False}
    if y is not None:
        given["y"] = y
    if not isinstance(x, (tf.data.Dataset, keras.utils.PyDataset)):
        given["batch_size"] = BATCH
    return {**given, **more}


def classifier(*middle: keras.layers.Layer, inputs: int = 4, final: str | None = "softmax") -> Any:
    """Returns a small classifier with some layers in the middle."""
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            keras.layers.Dense(5, "tanh"),
            *middle,
            keras.layers.Dense(CLASSES, final),
        ]
    )


def sgd(rate: float = 0.1) -> keras.optimizers.Optimizer:
    """Returns SGD with momentum."""
    return keras.optimizers.SGD(rate, momentum=0.9)


def adam(rate: float = 0.01) -> keras.optimizers.Optimizer:
    """Returns Adam, whose second moment depends on the size of each gradient."""
    return keras.optimizers.Adam(rate)


SPARSE = "sparse_categorical_crossentropy"

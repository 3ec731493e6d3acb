"""Replaces the downloads of public programs by synthetic data, and shortens data."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.programs.downloads import offer_files
from tests.programs.stand_ins import offer_modules

ROWS, BATCH, STEPS = 40, 16, 2
FORMS = {
    "mnist": ((28, 28), 10),
    "fashion_mnist": ((28, 28), 10),
    "cifar10": ((32, 32, 3), 10),
    "cifar100": ((32, 32, 3), 100),
}


def install(folder: Path) -> None:
    """Replaces downloads by synthetic data in this process. Files are written to `folder`."""
    for name, (shape, classes) in FORMS.items():
        module = getattr(keras.datasets, name)
        module.load_data = _images(shape, classes, column=name.startswith("cifar"))
    keras.datasets.imdb.load_data = _reviews
    keras.utils.plot_model = lambda *args, **options: None
    offer_files(folder)
    offer_modules()
    _without_pretrained_weights()
    for name in ("MirroredStrategy", "MultiWorkerMirroredStrategy"):
        setattr(tf.distribute, name, _current(getattr(tf.distribute, name)))


def _current(original: type) -> type:
    """Returns a class whose instances are the strategy that the program already runs in."""

    class Current(type):
        def __call__(cls, *args: Any, **options: Any) -> tf.distribute.Strategy:
            return tf.distribute.get_strategy()

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    return Current(original.__name__, (), {})


def cut(data: Any) -> Any:
    """Returns the first rows of arrays, or the first batches of a Dataset."""
    if isinstance(data, tf.data.Dataset):
        data = data.take(STEPS)
        if data.cardinality() >= 0:
            return data
        # On data of unknown length, plain Keras counts the end of the data as a step.
        return data.apply(tf.data.experimental.assert_cardinality(sum(1 for _ in data)))
    if isinstance(data, (np.ndarray, tf.Tensor)):
        return data[:ROWS]
    if isinstance(data, tuple | list):
        return type(data)(cut(part) for part in data)
    if isinstance(data, dict):
        return {name: cut(part) for name, part in data.items()}
    return data


def shorten_datasets(is_inside: Callable[[], bool]) -> None:
    """Makes each Dataset that a program makes one of small batches and in a fixed order.

    Args:
        is_inside: whether Keras or tfmulti make the Dataset, which is then left as it is.
    """
    batch, padded_batch = tf.data.Dataset.batch, tf.data.Dataset.padded_batch
    shuffle, map_ = tf.data.Dataset.shuffle, tf.data.Dataset.map

    def of_small_batches(original: Callable[..., Any]) -> Callable[..., Any]:
        def make(data: Any, batch_size: Any, *args: Any, **options: Any) -> Any:
            if isinstance(batch_size, int) and not is_inside():
                batch_size = min(batch_size, BATCH)
            return original(data, batch_size, *args, **options)

        return make

    def in_order(data: Any, *args: Any, **options: Any) -> Any:
        return shuffle(data, *args, **options) if is_inside() else data

    def mapped(data: Any, function: Any, *args: Any, **options: Any) -> Any:
        # Calls in parallel would draw random numbers in any order.
        return map_(data, function, *args, **options) if is_inside() else map_(data, function)

    tf.data.Dataset.batch = of_small_batches(batch)
    tf.data.Dataset.padded_batch = of_small_batches(padded_batch)
    tf.data.Dataset.shuffle = in_order
    tf.data.Dataset.map = mapped


def give_floats_of(floatx: str) -> None:
    """Makes functions of TensorFlow return Keras' type of floats if a program names none.

    Args:
        floatx: Keras' type of floats.
    """

    def with_floats(original: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **options: Any) -> Any:
            given = inspect.signature(original).bind(*args, **options).arguments
            return original(**{"dtype": floatx, **given})

        return make

    for name in ("eye", "one_hot", "ones", "zeros"):
        setattr(tf, name, with_floats(getattr(tf, name)))


def _rng() -> np.random.Generator:
    return np.random.default_rng(3)


def _images(shape: tuple[int, ...], classes: int, *, column: bool) -> Callable[..., Any]:
    def load_data(*args: Any, **options: Any) -> Any:
        def part(rows: int) -> Any:
            x = np.resize(_rng().integers(0, 256, (500, *shape)).astype("uint8"), (rows, *shape))
            y = (np.arange(rows) % classes).astype("uint8")
            return x, y[:, None] if column else y

        return part(50_000 if column else 60_000), part(10_000)

    return load_data


def _reviews(num_words: int | None = None, **options: Any) -> Any:
    def part(rows: int) -> Any:
        generator = _rng()
        x = [list(generator.integers(1, num_words or 500, 20 + i % 9)) for i in range(rows)]
        return np.array(x, dtype=object), np.arange(rows) % 2

    return part(200), part(100)


def _without_pretrained_weights() -> None:
    """Makes the models of keras.applications with weights drawn at random."""

    def untrained(original: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **options: Any) -> Any:
            return original(*args, **{**options, "weights": None})

        return make

    applications = keras.applications
    for owner in [applications, *(getattr(applications, name) for name in dir(applications))]:
        for name in dir(owner):
            thing = getattr(owner, name)
            if name[0].isupper() and callable(thing) and isinstance(owner, types.ModuleType):
                setattr(owner, name, untrained(thing))

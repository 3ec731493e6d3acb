"""The order in which `fit`, `evaluate` and `predict` take the batches of a `tf.data.Dataset`.

    python -m tests.support.dataset_orders OUT KIND...

writes to OUT a JSON object: for each kind and each Dataset, the codes of the batches in the order
in which they came. The kinds are `plain` (Keras without tfmulti), `one_device`, `with_checkpoint`
(the same with a Checkpoint callback), and `two_replicas`, which needs a separate process.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti import make_strategy, prepare
from tfmulti.training.checkpoint.callback import Checkpoint

CODES = np.random.default_rng(4).random(24).astype(np.float32)


def numbers(count: int = 24) -> tf.data.Dataset:
    return tf.data.Dataset.range(count)


def noisy(number: tf.Tensor) -> tf.Tensor:
    """Adds a draw of TensorFlow's own generator, so that the order of the draws can be seen."""
    return (number + tf.random.uniform([], 0, 24, tf.int64, seed=5)) % 24


DATASETS: dict[str, Callable[[], tf.data.Dataset]] = {
    "as it is": lambda: numbers().batch(5),
    "shuffled": lambda: numbers().shuffle(24, seed=3).batch(5),
    "shuffled in part": lambda: numbers().shuffle(7, seed=3).batch(4).prefetch(2),
    "always the same": lambda: (
        numbers().shuffle(24, seed=3, reshuffle_each_iteration=False).batch(5)
    ),
    "cached, shuffled": lambda: numbers().cache().shuffle(24, seed=3).batch(5),
    "shuffled, cached": lambda: numbers().shuffle(24, seed=3).cache().batch(5),
    "taken, shuffled, mapped": lambda: (
        numbers().take(20).shuffle(24, seed=3).map(lambda n: n + 1).batch(5)
    ),
    "shuffled, taken": lambda: numbers().shuffle(24, seed=3).take(13).batch(5),
    "shuffled, skipped": lambda: numbers().shuffle(24, seed=3).skip(13).batch(5),
    "mapped beside, read ahead": lambda: (
        numbers().shuffle(24, seed=3).map(lambda n: n, num_parallel_calls=2).batch(5).prefetch(3)
    ),
    "shuffled twice": lambda: numbers().shuffle(24, seed=3).shuffle(5, seed=4).batch(5),
    "batches shuffled": lambda: numbers().shuffle(24, seed=3).batch(5).shuffle(5, seed=4),
    "repeated, shuffled": lambda: numbers(12).repeat(2).shuffle(24, seed=3).batch(5),
    "shuffled, repeated": lambda: numbers(12).shuffle(24, seed=3).repeat(2).batch(5),
    "interleaved": lambda: (
        tf.data.Dataset.range(4)
        .shuffle(4, seed=2)
        .interleave(lambda i: tf.data.Dataset.range(6 * i, 6 * i + 6), 2)
        .batch(5)
    ),
    "one after the other": lambda: (
        numbers(12).shuffle(12, seed=1).concatenate(numbers(12).shuffle(12, seed=2)).batch(5)
    ),
    "side by side": lambda: (
        tf.data.Dataset.zip(numbers().shuffle(24, seed=1), numbers().shuffle(24, seed=2))
        .map(lambda a, b: (5 * a + b) % 24)
        .batch(5)
    ),
    "sampled": lambda: tf.data.Dataset.sample_from_datasets(
        [numbers(12).shuffle(12, seed=1), numbers(12).shuffle(9, seed=2)], [0.6, 0.4], seed=3
    ).batch(5),
    "of unknown length": lambda: numbers().shuffle(24, seed=3).filter(lambda n: n % 7 > 0).batch(5),
    "drawn by TensorFlow's generator": lambda: numbers().map(noisy).batch(5),
    "without an end": lambda: numbers(12).shuffle(12, seed=3).repeat().batch(5),
    "without an end, read ahead": lambda: (
        numbers(12).shuffle(12, seed=3).batch(5).prefetch(1).repeat()
    ),
    "without an end, repeated first": lambda: numbers(12).repeat().shuffle(12, seed=3).batch(5),
    # TensorFlow reads several batches ahead, and the end of a pass would draw the next order. So a
    # pass has more rows than all batches that a call can read.
    "without an end, mapped": lambda: (
        numbers(600).map(lambda n: n % 24).cache().shuffle(27, seed=3).repeat().batch(5)
    ),
}

# Reading a batch of these Datasets may draw an order. TensorFlow reads ahead of plain Keras' steps,
# too. So if an iterator is dropped before its end, the next order depends on the time.
DRAWN_WHILE_READ = (
    "shuffled twice",
    "batches shuffled",
    "shuffled, repeated",
    "one after the other",
    "without an end",
    "without an end, read ahead",
)


class Coded(keras.Model):
    """A model whose steps return a code: a number that identifies the examples of a batch."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.gather(tf.constant(CODES), inputs)

    def train_step(self, data: tf.Tensor) -> dict[str, Any]:
        return {"code": tf.reduce_mean(self(data))}

    test_step = train_step


class Noted(keras.callbacks.Callback):
    """Records the code of each batch, and stops the training at a given batch."""

    def __init__(self, found: list[float], stop_at: int | None = None) -> None:
        super().__init__()
        self.found, self.stop_at = found, stop_at

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.found.append(float(logs["code"]))
        if batch == self.stop_at:
            self.model.stop_training = True

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.found.append(float(logs["code"]))


def order_of(model: keras.Model, name: str, folder: Path | None) -> list[list[float]]:
    """Returns the codes of all batches of several calls with the same Datasets.

    Each `fit` has a Checkpoint in a separate folder below `folder`, unless `folder` is None.
    """
    keras.utils.set_random_seed(7)
    dataset, other = DATASETS[name](), DATASETS[name]()
    endless = int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
    some: dict[str, Any] = {"steps_per_epoch": 2}
    whole = some if endless else {}
    steps = {"steps": 2} if endless else {}
    of_validation = {"validation_steps": 2} if endless else {}
    found: list[list[float]] = []

    def noted(stop_at: int | None = None) -> dict[str, Any]:
        found.append([])
        return {"verbose": 0, "callbacks": [Noted(found[-1], stop_at)]}

    def fit(stop_at: int | None = None, **options: Any) -> None:
        options |= noted(stop_at)
        if folder is not None:
            checkpoint = Checkpoint(folder / str(len(found)), every_steps=3, every_s=None)
            options["callbacks"].append(checkpoint)
        model.fit(dataset, **options)

    fit(epochs=3, **whole)
    if endless and name in DRAWN_WHILE_READ:
        return found
    fit(epochs=2, validation_data=other, **whole, **of_validation)
    fit(epochs=2, validation_data=dataset, **whole, **of_validation)
    model.evaluate(dataset, **steps, **noted())
    found.append(model.predict(dataset, verbose=0, **steps).tolist())
    if name not in DRAWN_WHILE_READ:
        fit(epochs=3, validation_data=other, validation_steps=1, **some)
        fit(epochs=3, initial_epoch=1, stop_at=1, **whole)
        fit(epochs=1, **whole)
        fit(epochs=3, **some)
        model.evaluate(dataset, steps=2, **noted())
        found.append(model.predict(dataset, verbose=0, steps=2).tolist())
    fit(epochs=2, **whole)
    return found


def model_of(kind: str) -> keras.Model:
    if kind == "plain":
        model = Coded()
        model.compile("sgd")
        return model
    name, replicas = ("mirrored", 2) if kind == "two_replicas" else ("one_device", None)
    with make_strategy(name, replicas=replicas).scope():
        prepared = prepare(Coded())
        prepared.compile("sgd")
    return prepared


def orders_of(kind: str) -> dict[str, list[list[float]]]:
    model = model_of(kind)
    found = {}
    for name in DATASETS:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = order_of(model, name, Path(folder) if kind == "with_checkpoint" else None)
    return found


def main(out: str, *kinds: str) -> None:
    with warnings.catch_warnings():
        # Keras warns that the data of unknown length has ended.
        warnings.simplefilter("ignore")
        Path(out).write_text(json.dumps({kind: orders_of(kind) for kind in kinds}))


if __name__ == "__main__":
    main(*sys.argv[1:])

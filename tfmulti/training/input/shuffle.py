"""The order in which `fit` reads arrays.

With a seed of TensorFlow (`keras.utils.set_random_seed`), plain Keras reads arrays in an order that
follows from this seed alone. tfmulti reads them in the same order. Without such a seed, plain Keras
has another order in each run. Then tfmulti draws an order that is the same on all workers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorflow as tf


@dataclass(frozen=True)
class Shuffle:
    """The seeds of the order of one call of `fit`.

    Args:
        seed: the seed of tfmulti's own order, which is another one in each epoch.
        keras_seed: TensorFlow's global seed, if arrays are read in the order of plain Keras.
        within_batches: whether the order of plain Keras moves rows within their batches alone, as
            for `shuffle="batch"`.
    """

    seed: int
    keras_seed: int | None = None
    within_batches: bool = False


class KerasOrder:
    """The order in which plain Keras reads arrays.

    Keras makes a Dataset that draws the order, and reads it again in each epoch. The operation that
    draws begins again, too, so all epochs have the same order.
    """

    def __init__(self, examples: int, batch_size: int, shuffle: Shuffle) -> None:
        with tf.Graph().as_default() as graph:
            graph.seed = shuffle.keras_seed
            # These are the seeds of the first operation of a graph. Keras' Dataset maps a function,
            # which has a graph of its own.
            seed, seed2 = tf.compat.v1.get_seed(None)

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def shuffled(rows: tf.Tensor) -> tf.Tensor:
            return tf.raw_ops.RandomShuffle(value=rows, seed=seed, seed2=seed2)

        size = batch_size if shuffle.within_batches else examples
        with tf.device("CPU:0"):
            batches = tf.data.Dataset.range(examples).batch(size).map(shuffled)
            self._rows = np.concatenate(list(batches.as_numpy_iterator()))

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Returns the rows at the given positions, int64."""
        rows: np.ndarray = self._rows[positions]
        return rows

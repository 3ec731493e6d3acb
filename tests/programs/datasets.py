"""Forms of data: Datasets in every order, generators, sequences, structures of batches."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.programs.common import SPARSE, batches, classifier, features, fit, labels, sgd
from tests.programs.registry import Made, program

X, Y = features(4), labels()
ROWS = tf.data.Dataset.from_tensor_slices


def _on(data: Any, **more: Any) -> Made:
    given = {"optimizer": sgd(), "loss": SPARSE, "metrics": ["accuracy"]}
    return Made(classifier(), given, {"x": data, "epochs": 3, "shuffle": False, **more})


@program("keras-io: Simple MNIST convnet", "TensorFlow tutorial: Basic classification")
def shuffled_arrays() -> Made:
    """Arrays in the shuffled order that is Keras' default, with a part for validation."""
    return _on(X, y=Y, batch_size=8, shuffle=True, validation_split=0.2)


@program("keras-io: Image segmentation with a U-Net-like architecture")
def cached_and_shuffled() -> Made:
    """cache, shuffle with a seed, batch, prefetch."""
    return _on(ROWS((X, Y)).cache().shuffle(30, seed=3).batch(16).prefetch(2))


@program("TensorFlow tutorial: Multi-worker training with Keras")
def shuffled_repeated_and_taken() -> Made:
    """Shuffle with a seed, repeat, batch, with steps_per_epoch; validation that is taken."""
    data = ROWS((X, Y)).shuffle(30, seed=3).repeat().batch(8)
    return _on(data, steps_per_epoch=3, validation_data=batches(X, Y).take(1))


@program("keras-io: Speaker Recognition")
def taken_shuffled_and_mapped() -> Made:
    """take, skip, shuffle and map after each other."""
    data = ROWS((X, Y)).skip(2).take(25).shuffle(25, seed=5).map(lambda x, y: (x * 2.0, y))
    return _on(data.batch(8))


@program("keras-io: Video Classification")
def shuffled_after_batching() -> Made:
    """Batches that are shuffled as wholes, without a seed of their own but the global one."""
    return _on(batches(X, Y, batch=8).shuffle(4, seed=1, reshuffle_each_iteration=True))


# Where a Dataset does not know its length, plain Keras counts a step more at the end of an epoch:
# nothing orders the counter behind the batch that does not come.
COUNTS_TOO_MANY = ("slot/optimizer/iteration",)


@program("TensorFlow guide: tf.data", apart=COUNTS_TOO_MANY)
def dataset_of_a_generator() -> Made:
    """Dataset.from_generator, of unknown length, with a last batch of few rows."""

    def rows() -> Iterator[Any]:
        yield from zip(X[:29], Y[:29], strict=True)

    spec = (tf.TensorSpec((4,), tf.float32), tf.TensorSpec((), tf.int32))
    return _on(tf.data.Dataset.from_generator(rows, output_signature=spec).batch(7))


@program("Dataset.from_generator of batches that are sampled", apart=COUNTS_TOO_MANY)
def batches_sampled_by_python() -> Made:
    """A thread draws from Python's generator while the first step is traced."""

    def rows() -> Iterator[Any]:
        for _ in range(60):
            time.sleep(0.005)
            chosen = random.sample(range(len(X)), 8)
            yield X[chosen], Y[chosen]

    spec = (tf.TensorSpec((None, 4), tf.float32), tf.TensorSpec((None,), tf.int32))
    data = tf.data.Dataset.from_generator(rows, output_signature=spec).prefetch(60)
    return _on(data, steps_per_epoch=20)


@program("Keras: Model.fit of a generator")
def python_generator() -> Made:
    """A Python generator of batches without an end, with steps_per_epoch."""

    def forever() -> Iterator[Any]:
        while True:
            for at in range(0, 24, 8):
                yield X[at : at + 8], Y[at : at + 8]

    return _on(forever(), steps_per_epoch=2)


class Batches(keras.utils.PyDataset):
    """Batches of unequal sizes; `on_epoch_end` turns the order round."""

    def __init__(self) -> None:
        super().__init__()
        self.starts = [0, 5, 16]

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        at = self.starts[index]
        return X[at : at + 7 + index], Y[at : at + 7 + index]

    def on_epoch_end(self) -> None:
        self.starts = self.starts[::-1]


@program(
    "Keras guide: Training & evaluation with the built-in methods",
    "keras-io: Keypoint Detection with Transfer Learning",
)
def pydataset_that_changes() -> Made:
    """A PyDataset of batches of unequal sizes whose order changes at the end of an epoch."""
    return _on(Batches())


@program("TensorFlow guide: tf.data")
def dropped_remainder_and_tiny_batches() -> Made:
    """Fixed batches, with fewer rows in validation than there are replicas."""
    data = ROWS((X, Y)).batch(8, drop_remainder=True)
    return _on(data, validation_data=ROWS((X[:5], Y[:5])).batch(2))


@program("keras-io: Pretraining BERT", "TensorFlow guide: tf.data", apart=COUNTS_TOO_MANY)
def buckets_of_lengths() -> Made:
    """Rows of unequal lengths in batches by length, of several sizes and shapes."""
    lengths = np.random.default_rng(1).integers(1, 7, 30)
    ragged = tf.RaggedTensor.from_tensor(features(6, 2), lengths=lengths)
    data = ROWS((ragged, Y)).map(lambda x, y: (x.to_tensor() if hasattr(x, "to_tensor") else x, y))
    data = data.bucket_by_sequence_length(
        lambda x, y: tf.shape(x)[0], bucket_boundaries=[3, 5], bucket_batch_sizes=[8, 6, 4]
    )
    model = keras.Sequential(
        [keras.Input((None, 2)), layers.GlobalAveragePooling1D(), layers.Dense(3, "softmax")]
    )
    return Made(model, {"optimizer": sgd(), "loss": SPARSE}, fit(data))


@program("keras-io: Timeseries forecasting for weather prediction")
def windows_of_a_series() -> Made:
    """timeseries_dataset_from_array, a recurrent layer, a callback that saves the best."""
    series = features(3)
    data = keras.utils.timeseries_dataset_from_array(
        series, series[4:, :1], sequence_length=4, batch_size=8
    )
    model = keras.Sequential([keras.Input((4, 3)), layers.SimpleRNN(3), layers.Dense(1)])
    return Made(model, {"optimizer": sgd(0.01), "loss": "mse"}, fit(data, validation_data=data))


@program(
    "keras-io: Graph neural networks",
    "TensorFlow guide: tf.data",
    "keras-io: Traffic forecasting using graph neural networks and LSTM",
    apart=COUNTS_TOO_MANY,
)
def joined_and_flattened_datasets() -> Made:
    """concatenate, zip, flat_map and filter."""
    first = tf.data.Dataset.zip((ROWS(X), ROWS(Y))).filter(lambda x, y: y > 0)
    second = tf.data.Dataset.range(3).flat_map(lambda i: ROWS((X, Y)).skip(8 * i).take(4))
    return _on(first.concatenate(second).batch(8))


@program(
    "keras-io: Consistency training",
    "TensorFlow tutorial: data augmentation",
    "keras-io: CutMix data augmentation for image classification",
)
def augmented_by_seeds_in_map() -> Made:
    """Map with stateless draws from a counter of seeds."""
    seeds = tf.data.Dataset.counter()
    data = tf.data.Dataset.zip((ROWS((X, Y)), seeds)).map(
        lambda row, seed: (
            row[0] + tf.random.stateless_normal((4,), (seed, seed)),
            row[1],
        )
    )
    return _on(data.batch(16))


class LengthsOfTexts(keras.Model):
    def train_step(self, data: Any) -> Any:
        x, y, text = data
        number = tf.strings.to_number(tf.strings.regex_replace(text, "row ", ""))
        weight = tf.cast(tf.strings.length(text), "float32") + number
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(weight[:, None] * (self(x, training=True) - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def _with_a_third_part(part: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, features(1), part))


@program("keras-io: Structured data learning with texts")
def texts_in_the_step() -> Made:
    """Texts among the parts of a batch, from which the step computes numbers."""
    inputs = keras.Input((4,))
    model = LengthsOfTexts(inputs, layers.Dense(1)(inputs))
    texts = np.array([f"row {number}" for number in range(30)])
    return Made(model, {"optimizer": sgd(0.001)}, fit(_with_a_third_part(texts).batch(16)))


class TimesAPart(keras.Model):
    def train_step(self, data: Any) -> Any:
        x, y, factors = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2) * tf.reduce_sum(factors)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@program(
    "keras-io: parameters in the batch",
    expects="parts of a batch have different numbers of rows",
)
def part_without_rows() -> Made:
    """A part of each batch that has no row for each example."""
    inputs = keras.Input((4,))
    model = TimesAPart(inputs, layers.Dense(1)(inputs))
    data = _with_a_third_part(features(1)).batch(16).map(lambda x, y, z: (x, y, tf.ones([3])))
    return Made(model, {"optimizer": sgd()}, fit(data))


@program("Keras guide: Training & evaluation with the built-in methods")
def batch_of_tensors() -> Made:
    """Tensors of TensorFlow as arrays, whole numbers as inputs, and a dict of sample weights."""
    x, y = keras.Input((4,), name="x"), keras.Input((2,), name="y", dtype="int32")
    outputs = {
        "a": layers.Dense(1, name="a")(
            layers.concatenate([x, layers.Flatten()(layers.Embedding(5, 2)(y))])
        ),
        "b": layers.Dense(1, name="b")(x),
    }
    whole = np.random.default_rng(2).integers(0, 5, (30, 2))
    target = {"a": features(1), "b": features(1)}
    weight = {"a": np.linspace(0, 1, 30, dtype="float32"), "b": np.ones(30, "float32")}
    return Made(
        keras.Model([x, y], outputs),
        {"optimizer": sgd(0.01), "loss": "mse"},
        fit([tf.constant(X), tf.constant(whole)], target, sample_weight=weight),
    )

"""Models that workers train with local steps, and the same training in plain Keras and NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti.data.sharding import batch_bounds, share_bounds

EPOCHS, BATCH = 2, 24
_rng = np.random.default_rng(8)
X = _rng.standard_normal((96, 6)).astype(np.float32)
Y = _rng.integers(3, size=96).astype(np.int32)
WEIGHTS = _rng.uniform(0.2, 2.0, 96).astype(np.float32)

CROSSENTROPY = "sparse_categorical_crossentropy"


class ClipsInItsStep(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def build(self, shape: Any) -> None:
        self.dense.build(shape)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        clipped, _ = tf.clip_by_global_norm(gradients, 0.05)
        self.optimizer.apply(clipped, self.trainable_variables)
        return {"loss": loss}


def root_of_mean_squares(y_true: Any, y_pred: Any) -> Any:
    truth = keras.ops.one_hot(keras.ops.cast(keras.ops.reshape(y_true, [-1]), "int32"), 3)
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(truth - y_pred)))


def dense(*middle: Callable[[], keras.layers.Layer], loss: Any = CROSSENTROPY) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, "relu", kernel_regularizer=keras.regularizers.L2(0.01)),
            *(make() for make in middle),
            keras.layers.Dense(3, "softmax"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


def _adam() -> keras.Model:
    model = dense()
    model.compile(keras.optimizers.Adam(0.02, clipnorm=0.3), CROSSENTROPY)
    return model


def _custom_step() -> keras.Model:
    model = ClipsInItsStep()
    model.build((None, 6))
    model.compile(
        keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def _plain_sgd() -> keras.Model:
    model = dense()
    model.compile(keras.optimizers.SGD(0.2), CROSSENTROPY)
    return model


@dataclass(frozen=True)
class Variant:
    """How a model is built and prepared, and the rows that it is trained on."""

    build: Callable[[], keras.Model]
    sync_every: int = 2
    # Batches of 24, 24 and 13 rows.
    rows: int = 61
    has_sample_weights: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    rate: float = 0.7
    momentum: float = 0.9
    # An evaluation gathers the rows that the loss depends on. The training must not, even after it.
    evaluated_first: bool = False

    @property
    def prepared(self) -> dict[str, Any]:
        """The options of `prepare`."""
        outer = {"outer_learning_rate": self.rate, "outer_momentum": self.momentum}
        return {"sync_every": self.sync_every, **outer, **self.options}

    @property
    def data(self) -> tuple[np.ndarray, ...]:
        arrays = (X, Y, WEIGHTS) if self.has_sample_weights else (X, Y)
        return tuple(array[: self.rows] for array in arrays)


def mean_by_weight() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")


VARIANTS = {
    "momentum and a regularizer": Variant(dense),
    "adam with clipping": Variant(_adam, rate=0.5),
    "three steps, no outer momentum": Variant(dense, sync_every=3, momentum=0.0),
    "a scalar loss": Variant(lambda: dense(loss=root_of_mean_squares), evaluated_first=True),
    "a summed loss": Variant(
        lambda: dense(loss=keras.losses.SparseCategoricalCrossentropy(reduction="sum"))
    ),
    "a mean by sample weight": Variant(
        lambda: dense(loss=mean_by_weight()), has_sample_weights=True
    ),
    "a mean by sample weight in microbatches": Variant(
        lambda: dense(loss=mean_by_weight()), has_sample_weights=True, options={"microbatches": 2}
    ),
    "batch normalization": Variant(
        lambda: dense(lambda: keras.layers.BatchNormalization(momentum=0.8))
    ),
    "synchronized batch normalization": Variant(
        lambda: dense(lambda: keras.layers.BatchNormalization(momentum=0.8, synchronized=True))
    ),
    "a custom step that clips": Variant(_custom_step),
    # The last batch has one row.
    "a worker without rows": Variant(_plain_sgd, rows=49),
}


def expected_weights(variant: Variant, workers: int) -> list[np.ndarray]:
    """Returns the weights of a variant after local steps: each worker is a model of plain Keras."""
    models = []
    for _ in range(workers):
        keras.utils.set_random_seed(3)
        models.append(variant.build())
    trained = [v.trainable for v in models[0].weights]
    common = [value.astype(np.float64) for value in models[0].get_weights()]
    velocities = [np.zeros_like(value) for value in common]
    steps = -(-variant.rows // BATCH)
    for _ in range(EPOCHS):
        for start in range(0, steps, variant.sync_every):
            rows = np.zeros(workers)
            for step in range(start, min(start + variant.sync_every, steps)):
                first, last = batch_bounds(step, variant.rows, BATCH)
                for worker, model in enumerate(models):
                    a, b = share_bounds(last - first, workers, worker)
                    if b > a:
                        model.train_on_batch(*(d[first + a : first + b] for d in variant.data))
                        rows[worker] += b - a
            found = [model.get_weights() for model in models]
            common = _synchronized(variant, common, velocities, found, rows / rows.sum(), trained)
            for model in models:
                model.set_weights([value.astype(np.float32) for value in common])
    return common


def _synchronized(
    variant: Variant,
    common: list[np.ndarray],
    velocities: list[np.ndarray],
    found: Sequence[Sequence[np.ndarray]],
    parts: np.ndarray,
    trained: Sequence[bool],
) -> list[np.ndarray]:
    """Returns the weights of all workers after one synchronization. Updates `velocities`."""
    synchronized = []
    for i, value in enumerate(common):
        moved = sum(part * (value - own[i]) for part, own in zip(parts, found, strict=True))
        if trained[i]:
            velocities[i] = variant.momentum * velocities[i] + moved
            moved = variant.rate * (moved + variant.momentum * velocities[i])
        synchronized.append(value - moved)
    return synchronized

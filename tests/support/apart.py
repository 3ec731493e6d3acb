"""Models that workers train apart (`sync_every`), and the same by hand with plain Keras."""

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


class Clips(keras.Model):
    """A step of the user's own, which clips by itself."""

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
    made = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, "relu", kernel_regularizer=keras.regularizers.L2(0.01)),
            *(make() for make in middle),
            keras.layers.Dense(3, "softmax"),
        ]
    )
    made.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return made


def _adam() -> keras.Model:
    made = dense()
    made.compile(keras.optimizers.Adam(0.02, clipnorm=0.3), CROSSENTROPY)
    return made


def _clips() -> keras.Model:
    made = Clips()
    made.build((None, 6))
    made.compile(
        keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return made


def _few() -> keras.Model:
    made = dense()
    made.compile(keras.optimizers.SGD(0.2), CROSSENTROPY)
    return made


@dataclass(frozen=True)
class Variant:
    """How a model is made, what `prepare` is told, and on how many rows it is trained."""

    build: Callable[[], keras.Model]
    every: int = 2
    rows: int = 61  # 24, 24, 13
    weighed: bool = False
    prepared: dict[str, Any] = field(default_factory=dict)
    rate: float = 0.7
    momentum: float = 0.9
    evaluated: bool = False  # before it is trained, which gathers what all rows decide

    @property
    def options(self) -> dict[str, Any]:
        """What `prepare` is told of the outer optimizer."""
        return {"outer_learning_rate": self.rate, "outer_momentum": self.momentum}

    @property
    def data(self) -> tuple[np.ndarray, ...]:
        arrays = (X, Y, WEIGHTS) if self.weighed else (X, Y)
        return tuple(array[: self.rows] for array in arrays)


def by_weight() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")


VARIANTS = {
    "momentum and a regularizer": Variant(dense),
    "adam with clipping": Variant(_adam, rate=0.5),
    "three steps, no outer momentum": Variant(dense, every=3, momentum=0.0),
    "a loss of one number": Variant(lambda: dense(loss=root_of_mean_squares), evaluated=True),
    "a sum": Variant(
        lambda: dense(loss=keras.losses.SparseCategoricalCrossentropy(reduction="sum"))
    ),
    "means by weight": Variant(lambda: dense(loss=by_weight()), weighed=True),
    "means by weight in two passes": Variant(
        lambda: dense(loss=by_weight()), weighed=True, prepared={"microbatches": 2}
    ),
    "batch statistics": Variant(
        lambda: dense(lambda: keras.layers.BatchNormalization(momentum=0.8))
    ),
    "synchronized batch statistics": Variant(
        lambda: dense(lambda: keras.layers.BatchNormalization(momentum=0.8, synchronized=True))
    ),
    "a step that clips by itself": Variant(_clips),
    "no rows for some": Variant(_few, rows=49),  # 24, 24, 1
}


def by_hand(variant: Variant, workers: int) -> list[np.ndarray]:
    """Returns a variant's weights after workers have trained apart, in plain Keras and NumPy."""
    models = []
    for _ in range(workers):
        keras.utils.set_random_seed(3)
        models.append(variant.build())
    trained = [v.trainable for v in models[0].weights]
    common = [value.astype(np.float64) for value in models[0].get_weights()]
    velocities = [np.zeros_like(value) for value in common]
    steps = -(-variant.rows // BATCH)
    for _ in range(EPOCHS):
        for start in range(0, steps, variant.every):
            rows = np.zeros(workers)
            for step in range(start, min(start + variant.every, steps)):
                first, last = batch_bounds(step, variant.rows, BATCH)
                for worker, model in enumerate(models):
                    a, b = share_bounds(last - first, workers, worker)
                    if b > a:
                        model.train_on_batch(*(d[first + a : first + b] for d in variant.data))
                        rows[worker] += b - a
            found = [model.get_weights() for model in models]
            common = _met(variant, common, velocities, found, rows / rows.sum(), trained)
            for model in models:
                model.set_weights([value.astype(np.float32) for value in common])
    return common


def _met(
    variant: Variant,
    common: list[np.ndarray],
    velocities: list[np.ndarray],
    found: Sequence[Sequence[np.ndarray]],
    parts: np.ndarray,
    trained: Sequence[bool],
) -> list[np.ndarray]:
    """Returns the weights after a meeting; changes the velocities."""
    met = []
    for i, value in enumerate(common):
        moved = sum(part * (value - own[i]) for part, own in zip(parts, found, strict=True))
        if trained[i]:
            velocities[i] = variant.momentum * velocities[i] + moved
            moved = variant.rate * (moved + variant.momentum * velocities[i])
        met.append(value - moved)
    return met

"""The four networks that `benchmarks.compare` trains, and their data: the same for every peer.

This module imports neither TensorFlow nor PyTorch. The caller gives `keras_model` the Keras that
builds the network: Keras 3 or tf_keras.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

SEQUENCE, VOCABULARY, WIDTH, HEADS, DEPTH = 128, 20_000, 128, 4, 4
LEARNING_RATE, MOMENTUM = 0.01, 0.9


@dataclass(frozen=True)
class Workload:
    """A network and how it is trained: `steps` steps are timed after `warm_up` others."""

    name: str
    batch: int
    steps: int
    warm_up: int
    outputs: int = 10

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns made-up examples, one for each row of each step, and their labels (int32)."""
        rng = np.random.default_rng(0)
        rows = (self.warm_up + self.steps) * self.batch
        y = rng.integers(0, self.outputs, rows).astype(np.int32)
        if self.name == "transformer":
            return rng.integers(0, VOCABULARY, (rows, SEQUENCE)).astype(np.int32), y
        shape = {"mlp": (784,), "cnn": (28, 28, 1), "resnet20": (32, 32, 3)}[self.name]
        return rng.standard_normal((rows, *shape), dtype=np.float32), y


WORKLOADS = {
    work.name: work
    for work in (
        Workload("mlp", 256, 120, 20),
        Workload("cnn", 256, 80, 20),
        Workload("resnet20", 128, 16, 4),
        Workload("transformer", 32, 24, 6, outputs=2),
    )
}


def keras_model(name: str, keras: Any) -> Any:
    """Returns a workload's network, which ends in logits, built with that Keras."""
    make = {"mlp": _mlp, "cnn": _cnn, "resnet20": _resnet20, "transformer": _transformer}[name]
    return make(keras)


def compile_model(model: Any, keras: Any, steps_a_call: int = 1) -> None:
    """Compiles a workload's network with the optimizer and loss that all peers have."""
    model.compile(
        keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps_a_call,
    )


def _mlp(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(1024, activation="relu"),
            layers.Dense(1024, activation="relu"),
            layers.Dense(10),
        ]
    )


def _cnn(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def _resnet20(keras: Any) -> Any:
    layers = keras.layers

    def conv_norm(x: Any, filters: int, kernel: int, stride: int) -> Any:
        x = layers.Conv2D(filters, kernel, stride, padding="same", use_bias=False)(x)
        return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)

    inputs = keras.Input((32, 32, 3))
    x = layers.ReLU()(conv_norm(inputs, 16, 3, 1))
    for stage, filters in enumerate((16, 32, 64)):
        for block in range(3):
            stride = 2 if stage and not block else 1
            y = layers.ReLU()(conv_norm(x, filters, 3, stride))
            y = conv_norm(y, filters, 3, 1)
            shortcut = conv_norm(x, filters, 1, stride) if stride > 1 else x
            x = layers.ReLU()(layers.Add()([y, shortcut]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10)(x))


def _transformer(keras: Any) -> Any:
    layers = keras.layers

    class Positions(layers.Layer):  # type: ignore[misc, name-defined]
        def build(self, shape: Any) -> None:
            self.table = self.add_weight(
                shape=(SEQUENCE, WIDTH), initializer="random_normal", name="table"
            )

        def call(self, x: Any) -> Any:
            return x + self.table

    inputs = keras.Input((SEQUENCE,), dtype="int32")
    x = Positions()(layers.Embedding(VOCABULARY, WIDTH)(inputs))
    for _ in range(DEPTH):
        y = layers.LayerNormalization(epsilon=1e-5)(x)
        x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y)
        y = layers.LayerNormalization(epsilon=1e-5)(x)
        x = x + layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="relu")(y))
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization(epsilon=1e-5)(x))
    return keras.Model(inputs, layers.Dense(2)(x))

"""Trains on two CPU devices, once treated as GPUs and once as CPUs, and prints both results.

python -m tests.support.ahead
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti import make_strategy, prepare
from tfmulti.distribution.strategies import Placement, placement_of
from tfmulti.training import distributed_model
from tfmulti.training.input.worker_batch import WorkerBatch
from tfmulti.training.step import execution, xla

traces: list[str] = []
placed: list[Any] = []


class Model(keras.Model):
    """Counts how often its step is traced."""

    def train_step(self, data: Any) -> Any:
        traces.append("train")
        return super().train_step(data)


def as_gpus(strategy: Any) -> Placement:
    return dataclasses.replace(placement_of(strategy), gpus=strategy.extended.worker_devices)


def noting(batch: WorkerBatch, devices: Any) -> WorkerBatch:
    placed.append(list(devices))
    return on_devices(batch, devices)


on_devices = execution.on_devices


def trained(strategy: Any) -> Any:
    traces.clear()
    keras.utils.set_random_seed(4)
    x = np.random.default_rng(1).standard_normal((50, 6)).astype(np.float32)
    y = (x.sum(1) > 0).astype(np.int32)
    with strategy.scope():
        inputs = keras.Input((6,))
        hidden = keras.layers.Dropout(0.3)(keras.layers.Dense(8, "relu")(inputs))
        model = prepare(Model(inputs, keras.layers.Dense(2, "softmax")(hidden)), seed=3)
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    options = {"batch_size": 12, "validation_data": (x[:17], y[:17]), "verbose": 0}
    first = model.fit(x, y, epochs=3, **options).history
    model.fit(x, y, epochs=1, **options)
    predicted = model.predict(x[:5], verbose=0)
    weights = [float(np.abs(w).sum()) for w in model.get_weights()]
    return {**first, "weights": weights, "predicted": predicted.tolist()}, len(traces)


def losses_with_sparse_inputs(strategy: Any) -> list[float]:
    """Returns the losses of a model that XLA cannot compile, because its inputs are sparse."""
    x = np.eye(6, dtype=np.float32)[np.arange(48) % 6]
    with strategy.scope():
        outputs = keras.layers.Dense(1)(inputs := keras.Input((6,), sparse=True))
        model = prepare(keras.Model(inputs, outputs), verify=False)
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x), x[:, :1])).batch(12)
    return model.fit(data, epochs=2, verbose=0).history["loss"]


def main() -> None:
    strategy = make_strategy("mirrored", replicas=2)
    found = [trained(strategy)]
    for module in (distributed_model, execution, xla):
        module.placement_of = as_gpus  # type: ignore[attr-defined]
    execution.on_devices = noting
    found.append(trained(strategy))
    print(json.dumps([found, placed, losses_with_sparse_inputs(strategy)]))


if __name__ == "__main__":
    main()

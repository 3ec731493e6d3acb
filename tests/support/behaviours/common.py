"""Provides what all behaviours need: the strategy, a small model, and data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti import prepare
from tfmulti.distribution.strategies import Placement

_rng = np.random.default_rng(5)
X = _rng.standard_normal((96, 6)).astype(np.float32)
Y = _rng.integers(3, size=96).astype(np.int32)


class Here:
    """The worker that runs the behaviours. `__main__` sets it before the first behaviour."""

    strategy: tf.distribute.Strategy
    placement: Placement
    # A folder that all workers share, and that no other behaviour writes to.
    shared: Path


here = Here()


def classifier(
    *extra: keras.layers.Layer,
    prepared: Any = None,
    kind: type[keras.Sequential] = keras.Sequential,
    **compile_options: Any,
) -> keras.Model:
    """Returns a small model with `extra` layers in its middle.

    `prepared` are options of `prepare`, `compile_options` those of `compile`, and `kind` is the
    class of the model.
    """
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        model = prepare(
            kind(
                [
                    keras.Input((6,)),
                    keras.layers.Dense(8, "relu"),
                    *extra,
                    keras.layers.Dense(3, "softmax"),
                ]
            ),
            **(prepared or {}),
        )
        model.compile(
            **{
                "optimizer": keras.optimizers.SGD(0.1),
                "loss": "sparse_categorical_crossentropy",
                "metrics": ["accuracy"],
                **compile_options,
            }
        )
    return model


def fit(model: keras.Model, **options: Any) -> dict[str, Any]:
    """Trains a model, and returns its history."""
    given = {"x": X, "y": Y, "batch_size": 24, "epochs": 2, "verbose": 0, **options}
    history = model.fit(**given).history
    return {name: [float(v) for v in values] for name, values in history.items()}


def weights_of(model: keras.Model) -> list[Any]:
    return [weight.tolist() for weight in model.get_weights()]


def on_all_replicas(function: Callable[[], Any]) -> list[Any]:
    """Runs a function on each local replica, and returns what it returned on each."""
    found = tf.function(lambda: here.strategy.run(function))()
    return [
        keras.ops.convert_to_numpy(value).tolist()
        for value in here.strategy.experimental_local_results(found)
    ]

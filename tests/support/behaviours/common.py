"""What all behaviours share: the strategy, a small model, and data."""

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


class LocalMachine:
    """Where the behaviours run; set before the first."""

    strategy: tf.distribute.Strategy
    place: Placement
    shared: Path  # one folder for all workers


here = LocalMachine()

BEHAVIOURS: dict[str, Callable[[], Any]] = {}


KINDS: dict[str, tuple[str, ...]] = {}  # of strategies, where a behaviour does not need each


def behaviour(function: Callable[[], Any]) -> Callable[[], Any]:
    assert function.__name__ not in BEHAVIOURS
    BEHAVIOURS[function.__name__] = function
    return function


def behaviour_at(*kinds: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Registers a behaviour that is run under these strategies alone."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        KINDS[function.__name__] = kinds
        return behaviour(function)

    return register


def model(*extra: keras.layers.Layer, prepared: Any = None, **compile_options: Any) -> keras.Model:
    """Returns a small classifier with `extra` layers in the middle; `prepared` for prepare."""
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        made = prepare(
            keras.Sequential(
                [
                    keras.Input((6,)),
                    keras.layers.Dense(8, "relu"),
                    *extra,
                    keras.layers.Dense(3, "softmax"),
                ]
            ),
            **(prepared or {}),
        )
        made.compile(
            **{
                "optimizer": keras.optimizers.SGD(0.1),
                "loss": "sparse_categorical_crossentropy",
                "metrics": ["accuracy"],
                **compile_options,
            }
        )
    return made


def fit(made: keras.Model, **options: Any) -> dict[str, Any]:
    given = {"x": X, "y": Y, "batch_size": 24, "epochs": 2, "verbose": 0, **options}
    history = made.fit(**given).history
    return {name: [float(v) for v in values] for name, values in history.items()}


def on_all_replicas(function: Callable[[], Any]) -> list[Any]:
    """Returns what a function of replica context returns on each local replica."""
    found = tf.function(lambda: here.strategy.run(function))()
    return [
        keras.ops.convert_to_numpy(value).tolist()
        for value in here.strategy.experimental_local_results(found)
    ]

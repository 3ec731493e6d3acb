"""A warning for models that are made in a strategy's scope and are not prepared.

With several replicas Keras' own methods give other numbers than one device, and fail on several
workers. A program may prepare one of its models and forget another one, such as the encoder of an
autoencoder.

| what | name | upstream | can go when |
|---|---|---|---|
| `install` | public: `fit`, `evaluate` and the `…_on_batch` methods of `keras.Model` | keras#20585 | Keras' own methods give one device's numbers under a strategy |
"""  # noqa: E501

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import keras

from tfmulti.keras_patches.patching import replace
from tfmulti.keras_patches.variables import strategy_of

# `predict` gives one device's numbers in plain Keras, too.
_METHODS = ("fit", "evaluate", "train_on_batch", "test_on_batch", "predict_on_batch")
_told: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def install() -> None:
    """Lets the methods of models that are not prepared warn. Prepared models have their own."""
    for name in _METHODS:
        replace(keras.Model, name, _warning)


def _warning(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that first warns, once for each model, and then does as before."""

    def method(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_of(self)
        replicas = 1 if strategy is None else strategy.num_replicas_in_sync
        if replicas > 1 and self not in _told:
            _told.add(self)
            warnings.warn(
                f"the {type(self).__name__} {self.name!r} was made in the scope of {replicas} "
                f"replicas, and is not prepared. So {original.__name__} is that of Keras, whose "
                "numbers are not those of one device there. Call tfmulti.prepare(model) first.",
                stacklevel=2,
            )
        return original(self, *args, **kwargs)

    return method

"""How a function of Keras or TensorFlow is replaced, once, by one that knows of replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfmulti.distribution.replica_slice import (
    partial,
)


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    if not hasattr(original, "_tfmulti"):
        new = functools.wraps(original)(make(original))
        vars(new)["_tfmulti"] = True
        setattr(owner, name, new)


def in_replica_slice(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Returns what makes TensorFlow's function call `function(original, share, …)` in a share."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            share = partial()
            if share is None:
                return original(*args, **kwargs)
            return function(original, share, *args, **kwargs)

        return call

    return make


def is_of_keras(function: Any) -> bool:
    """Whether a function or class is Keras' own, whose value of a row is computed from that row."""
    module = getattr(function, "__module__", "")
    return module.startswith("keras.src.") and function is not keras.losses.circle

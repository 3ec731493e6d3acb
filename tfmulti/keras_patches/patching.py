"""Tools that replace a function of Keras or TensorFlow by a version that knows about replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfmulti.distribution.replica_slice import partial


def replace(owner: Any, name: str, make: Callable[[Any], Any], mark: str = "_tfmulti") -> None:
    """Replaces a function of a class or module, unless it is a replacement already.

    Args:
        owner: the class or module that holds the function.
        name: the attribute under which `owner` holds it.
        make: takes the original function and returns the new one.
        mark: the attribute by which a replacement is known. A second replacement of the same
            function needs another one.
    """
    original = getattr(owner, name)
    if not hasattr(original, mark):
        new = functools.wraps(original)(make(original))
        vars(new)[mark] = True
        setattr(owner, name, new)


def in_replica_slice(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Returns the `make` of `replace` that calls `function(original, replica_slice, …)`.

    The original function is called as before outside a prepared model's step, and where the slice
    is the whole global batch.

    Args:
        function: takes the original function, the `ReplicaSlice`, and the call's arguments.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            replica_slice = partial()
            if replica_slice is None:
                return original(*args, **kwargs)
            return function(original, replica_slice, *args, **kwargs)

        return call

    return make


# The circle loss compares each row with all other rows. The hinge losses take 0 and 1 for classes
# only if no row of the batch has another target.
_OF_ALL_ROWS = (keras.losses.circle, keras.losses.hinge, keras.losses.squared_hinge)


def is_of_keras(function: Any) -> bool:
    """Returns whether Keras defines a function or class, and computes each row by itself there."""
    module = getattr(function, "__module__", "")
    return module.startswith("keras.src.") and function not in _OF_ALL_ROWS

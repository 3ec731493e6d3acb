"""A model that a user's own function returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras

from tfmulti.errors import ModelError
from tfmulti.sources.data import DataSpec


def build(place: str, function: Callable[..., Any], spec: DataSpec | None) -> keras.Model:
    """Returns the model of `package.module:function`, compiled or not.

    The function takes nothing, or one argument: the `DataSpec` of the data.

    Raises:
        ModelError: it returned no Keras model, or needs more arguments.
    """
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD]
    if len(needed) > 1:
        raise ModelError(
            f"--model {place} needs the arguments {', '.join(needed)}. It may take one: the "
            "form of the data."
        )
    model = function(spec) if needed else function()
    if not isinstance(model, keras.Model):
        raise ModelError(
            f"--model {place} returned a {type(model).__name__}. Return a keras.Model."
        )
    return model

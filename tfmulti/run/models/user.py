"""Builds a model by the user's own function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras

from tfmulti.data.data_set import DataSpec
from tfmulti.errors import ModelError
from tfmulti.keras_patches.model_structure import last_operations


def build(reference: str, function: Callable[..., Any], spec: DataSpec | None) -> keras.Model:
    """Returns the model that a user's function makes, compiled or not.

    The function may need one argument, which is the form of the data.

    Args:
        reference: the text `package.module:function`, for messages.
        function: the function.
        spec: the form of the data, or None if it is not known.

    Raises:
        ModelError: the function needs several arguments, or returns no Keras model.
    """
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD]
    if len(needed) > 1:
        raise ModelError(
            f"--model {reference} needs the arguments {', '.join(needed)}. It may take one: the "
            "form of the data."
        )
    model = function(spec) if needed else function()
    if not isinstance(model, keras.Model):
        raise ModelError(
            f"--model {reference} returned a {type(model).__name__}. Return a keras.Model."
        )
    return model


def check_input(reference: str, model: keras.Model, spec: DataSpec | None, dataset: str) -> None:
    """Checks that a model with one input of a known shape takes the examples of the data.

    Args:
        reference: the text `package.module:function`, for the message.
        model: the model.
        spec: the form of the data, or None if it is not known.
        dataset: the name of the data, for the message.

    Raises:
        ModelError: the model takes examples of another shape.
    """
    # A subclass has no such property, but may have an attribute of this name.
    if spec is None or not isinstance(getattr(type(model), "input_shape", None), property):
        return
    try:
        shape = model.input_shape
    except (AttributeError, ValueError):
        # A Sequential without an Input.
        return
    if not (isinstance(shape, tuple) and all(isinstance(n, int | None) for n in shape)):
        return
    wanted, given = shape[1:], spec.input_shape
    # Keras adds or removes a last axis of one value.
    if len(wanted) == len(given) + 1 and wanted[-1] == 1:
        wanted = wanted[:-1]
    elif len(given) == len(wanted) + 1 and given[-1] == 1:
        given = given[:-1]
    fits = len(wanted) == len(given) and all(
        axis in (None, size) for axis, size in zip(wanted, given, strict=True)
    )
    if not fits:
        raise ModelError(
            f"--model {reference} takes examples of shape {shape[1:]}, but those of --dataset "
            f"{dataset} have shape {spec.input_shape} ({spec.describe()}). Give the --dataset of "
            "this model, or change its Input."
        )


def ends_in_logits(reference: str, model: keras.Model) -> bool:
    """Returns whether a classification model outputs logits, by its last layer.

    Args:
        reference: the text `package.module:function`, for the message.
        model: a model that is not compiled.

    Raises:
        ModelError: the last layer does not show whether the outputs are probabilities or logits.
    """
    last = last_operations(model) if model.built else None
    layer = last[0] if last is not None and len(last) == 1 else None
    activation = getattr(layer, "activation", None)
    if isinstance(layer, keras.layers.Softmax) or activation is keras.activations.softmax:
        return False
    if activation is keras.activations.linear:
        return True
    words = f"its last layer {layer.name!r} does" if layer is not None else "its layers do"
    raise ModelError(
        f"--model {reference} is not compiled, and {words} not tell whether its outputs are "
        "probabilities or logits. Call model.compile(optimizer, loss) in the function, or end the "
        "model in a Dense layer with activation 'softmax' or none."
    )

"""What all built-in models share: the first layers and the last one."""

from __future__ import annotations

from typing import Any

import keras

from tfmulti.sources.data import CLASSIFICATION, DataSpec


def model_input(spec: DataSpec) -> tuple[Any, Any]:
    """Returns the input of a model and the same values scaled to order 1."""
    inputs = keras.Input(spec.input_shape, dtype=spec.input_dtype, name="input")
    if spec.vocabulary_size is not None:
        return inputs, inputs
    if spec.input_scale == 1.0:
        return inputs, inputs
    return inputs, keras.layers.Rescaling(spec.input_scale, name="scale")(inputs)


def model_output(spec: DataSpec, x: Any) -> Any:
    """Returns class probabilities or predicted values, float32 under any precision."""
    activation = "softmax" if spec.task == CLASSIFICATION else None
    layer = keras.layers.Dense(spec.outputs, activation, dtype="float32", name="output")
    return layer(x)

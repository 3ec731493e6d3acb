"""Builds the first layers and the output layer, which all built-in models share."""

from __future__ import annotations

from typing import Any

import keras

from tfmulti.data.data_set import CLASSIFICATION, DataSpec


def model_input(spec: DataSpec) -> tuple[Any, Any]:
    """Returns the input of a model, and its values normalized or scaled as the data asks.

    Tokens are returned as they are.
    """
    inputs = keras.Input(spec.input_shape, dtype=spec.input_dtype, name="input")
    if spec.vocabulary_size is not None:
        return inputs, inputs
    if spec.input_mean is not None and spec.input_std is not None:
        return inputs, _normalized(inputs, spec.input_mean, spec.input_std)
    if spec.input_scale == 1.0:
        return inputs, inputs
    return inputs, keras.layers.Rescaling(spec.input_scale, name="scale")(inputs)


def _normalized(inputs: Any, mean: tuple[float, ...], std: tuple[float, ...]) -> Any:
    """Returns the inputs minus their mean, divided by their standard deviation, in float32."""
    # The mean is subtracted first, because the difference of near values is exact. Keras'
    # Normalization layer is not used, because it raises deviations below 1e-7 to 1e-7. The layers
    # compute in float32, because raw values may be too large for float16.
    layer = keras.layers.Rescaling
    x = layer(1.0, [-value for value in mean], dtype="float32", name="center")(inputs)
    return layer([1.0 / value for value in std], dtype="float32", name="scale")(x)


def model_output(spec: DataSpec, x: Any) -> Any:
    """Returns class probabilities or predicted values, which are float32 under any precision."""
    activation = "softmax" if spec.task == CLASSIFICATION else None
    layer = keras.layers.Dense(spec.outputs, activation, dtype="float32", name="output")
    return layer(x)

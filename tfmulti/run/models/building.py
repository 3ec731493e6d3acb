"""What all built-in models share: the first layers and the last one."""

from __future__ import annotations

from typing import Any

import keras

from tfmulti.data.data_set import CLASSIFICATION, DataSpec


def model_input(spec: DataSpec) -> tuple[Any, Any]:
    """Returns the input of a model and the same values scaled to order 1."""
    inputs = keras.Input(spec.input_shape, dtype=spec.input_dtype, name="input")
    if spec.vocabulary_size is not None:
        return inputs, inputs
    if spec.input_mean is not None and spec.input_std is not None:
        return inputs, _normalized(inputs, spec.input_mean, spec.input_std)
    if spec.input_scale == 1.0:
        return inputs, inputs
    return inputs, keras.layers.Rescaling(spec.input_scale, name="scale")(inputs)


def _normalized(inputs: Any, mean: tuple[float, ...], std: tuple[float, ...]) -> Any:
    # First the mean, then the deviation: the difference of near values is exact. Keras'
    # Normalization takes deviations below 1e-7 as 1e-7. Raw values may be beyond float16.
    layer = keras.layers.Rescaling
    x = layer(1.0, [-value for value in mean], dtype="float32", name="center")(inputs)
    return layer([1.0 / value for value in std], dtype="float32", name="scale")(x)


def model_output(spec: DataSpec, x: Any) -> Any:
    """Returns class probabilities or predicted values, float32 under any precision."""
    activation = "softmax" if spec.task == CLASSIFICATION else None
    layer = keras.layers.Dense(spec.outputs, activation, dtype="float32", name="output")
    return layer(x)

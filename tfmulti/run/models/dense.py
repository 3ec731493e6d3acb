"""Builds `linear` and `mlp`, fully connected models for data of any shape."""

from __future__ import annotations

import keras

from tfmulti.data.data_set import DataSpec
from tfmulti.run.models.building import model_input, model_output


def linear(spec: DataSpec) -> keras.Model:
    """Returns a model with one dense layer from the values of an example to the outputs."""
    inputs, x = model_input(spec)
    return keras.Model(inputs, model_output(spec, keras.layers.Flatten()(x)), name="linear")


def mlp(spec: DataSpec) -> keras.Model:
    """Returns a model with Dense(64, relu) and the output layer."""
    inputs, x = model_input(spec)
    x = keras.layers.Dense(64, "relu")(keras.layers.Flatten()(x))
    return keras.Model(inputs, model_output(spec, x), name="mlp")

"""Builds `lenet` and `cnn`, two small convolutional networks."""

from __future__ import annotations

import keras
from keras import layers

from tfmulti.data.data_set import DataSpec
from tfmulti.run.models.building import model_input, model_output


def lenet(spec: DataSpec) -> keras.Model:
    """Returns a network with the layers of LeNet-5, with `tanh` and average pooling.

    The images may have any size from 4×4, because the convolutions pad.

    Source: LeCun et al., Gradient-based learning applied to document recognition, 1998.
    """
    inputs, x = model_input(spec)
    for filters in (6, 16):
        x = layers.Conv2D(filters, 5, padding="same", activation="tanh")(x)
        x = layers.AveragePooling2D(2)(x)
    x = layers.Flatten()(x)
    for units in (120, 84):
        x = layers.Dense(units, "tanh")(x)
    return keras.Model(inputs, model_output(spec, x), name="lenet")


def cnn(spec: DataSpec) -> keras.Model:
    """Returns a network of two 3×3 convolutions (32 and 64 filters) with pooling and Dense(128)."""
    inputs, x = model_input(spec)
    for filters in (32, 64):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D(2)(x)
    x = layers.Dense(128, "relu")(layers.Flatten()(x))
    return keras.Model(inputs, model_output(spec, x), name="cnn")

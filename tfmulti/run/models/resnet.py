"""Builds the residual networks `resnet20` and `resnet50`.

Source: He et al., Deep residual learning for image recognition, 2015 (arXiv:1512.03385).
"""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from tfmulti.data.data_set import DataSpec
from tfmulti.run.models.building import model_input, model_output


def resnet20(spec: DataSpec) -> keras.Model:
    """Returns the 20-layer network for small images: three stages of 3 blocks, 16 to 64 filters."""
    inputs, x = model_input(spec)
    x = _conv_norm(x, 16, 3)
    for stage, filters in enumerate((16, 32, 64)):
        for block in range(3):
            x = _basic_block(x, filters, stride=2 if stage and not block else 1)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, model_output(spec, x), name="resnet20")


def resnet50(spec: DataSpec) -> keras.Model:
    """Returns the 50-layer network: 3, 4, 6 and 3 bottleneck blocks of 64 to 512 filters."""
    inputs, x = model_input(spec)
    x = _conv_norm(x, 64, 7, stride=2)
    x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
    for stage, (filters, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            x = _bottleneck(x, filters, stride=2 if stage and not block else 1)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, model_output(spec, x), name="resnet50")


def _conv_norm(x: Any, filters: int, kernel: int, stride: int = 1, *, relu: bool = True) -> Any:
    """Returns a convolution, followed by batch normalization and ReLU."""
    x = layers.Conv2D(
        filters,
        kernel,
        stride,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        kernel_regularizer=keras.regularizers.L2(1e-4),
    )(x)
    x = layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)
    return layers.ReLU()(x) if relu else x


def _join(x: Any, shortcut: Any, stride: int) -> Any:
    """Returns the sum with the shortcut, which is projected if its shape differs."""
    if stride != 1 or shortcut.shape[-1] != x.shape[-1]:
        shortcut = _conv_norm(shortcut, x.shape[-1], 1, stride, relu=False)
    return layers.ReLU()(layers.Add()([x, shortcut]))


def _basic_block(x: Any, filters: int, stride: int) -> Any:
    """Returns a residual block of two 3×3 convolutions."""
    y = _conv_norm(x, filters, 3, stride)
    return _join(_conv_norm(y, filters, 3, relu=False), x, stride)


def _bottleneck(x: Any, filters: int, stride: int) -> Any:
    """Returns a residual block of a 1×1, a 3×3 and a 1×1 convolution."""
    y = _conv_norm(x, filters, 1)
    y = _conv_norm(y, filters, 3, stride)
    return _join(_conv_norm(y, 4 * filters, 1, relu=False), x, stride)

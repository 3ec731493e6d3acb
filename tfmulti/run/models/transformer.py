"""Builds `vit` and `transformer`, encoders of pre-normalized attention blocks.

The models have only layers of Keras itself, so a saved model loads without tfmulti.

Sources: Dosovitskiy et al., An image is worth 16×16 words, 2020 (arXiv:2010.11929); Xiong et al.,
On layer normalization in the transformer architecture, 2020 (arXiv:2002.04745).
"""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from tfmulti.data.data_set import DataSpec
from tfmulti.run.models.building import model_input, model_output

_WIDTH, _HEADS, _DEPTH, _DROPOUT = 128, 4, 4, 0.1


def vit(spec: DataSpec) -> keras.Model:
    """Returns a small vision transformer with width 128, 4 blocks and patches of `patch_size`."""
    inputs, x = model_input(spec)
    height, width, _ = spec.input_shape
    size = patch_size(height, width)
    count = (height // size) * (width // size)
    x = layers.Conv2D(_WIDTH, size, size, name="patches")(x)
    x = layers.Reshape((count, _WIDTH))(x)
    return keras.Model(inputs, model_output(spec, _encode(x, count)), name="vit")


def text_classifier(spec: DataSpec) -> keras.Model:
    """Returns a transformer over tokens with width 128, 4 blocks and the mean over positions."""
    inputs, x = model_input(spec)
    x = layers.Embedding(spec.vocabulary_size, _WIDTH, name="tokens")(x)
    return keras.Model(
        inputs, model_output(spec, _encode(x, spec.input_shape[0])), name="transformer"
    )


def patch_size(height: int, width: int) -> int:
    """Returns the largest of some patch sizes that gives at least 36 whole patches, or 1."""
    for size in (16, 8, 7, 4, 2):
        if height % size == 0 and width % size == 0 and height * width // size**2 >= 36:
            return size
    return 1


def _encode(x: Any, length: int) -> Any:
    """Returns the mean over the positions after all attention blocks."""
    # A dense layer with another bias for each position adds the position embedding. A layer of
    # Keras itself can be loaded without tfmulti.
    x = layers.EinsumDense("bti,io->bto", (length, _WIDTH), bias_axes="to", name="positions")(x)
    for _ in range(_DEPTH):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(_HEADS, _WIDTH // _HEADS)(y, y)
        x = layers.Add()([x, layers.Dropout(_DROPOUT)(y)])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(_WIDTH)(layers.Dense(4 * _WIDTH, "gelu")(y))
        x = layers.Add()([x, layers.Dropout(_DROPOUT)(y)])
    return layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))

"""Compares counts of a training step's operations with counts by hand."""

from __future__ import annotations

import random
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfmulti.run.callbacks.flops import training_flops

pytestmark = pytest.mark.mirrored

CONVOLUTION = {"padding": "same", "use_bias": False}


def one(*shape: int, dtype: tf.DType = tf.float32) -> tf.TensorSpec:
    return tf.TensorSpec([None, *shape], dtype)


def forward(layer: keras.layers.Layer, *shape: int, dtype: tf.DType = tf.float32) -> float | None:
    """Returns the operations of a layer's forward pass, a third of the count."""
    made = keras.Sequential([keras.Input(shape, dtype=dtype.name), layer])
    counted = training_flops(made, one(*shape, dtype=dtype))
    return None if counted is None else counted / 3


def test_dense_layers() -> None:
    # There are 5 sums of 7 products, and 5 biases.
    assert forward(layers.Dense(5), 7) == 75
    assert forward(layers.Dense(5), 6, 7) == 6 * 75
    assert forward(layers.EinsumDense("abc,cde->abde", (None, 2, 4)), 5, 8) == 2 * 5 * 8 * (2 * 4)
    assert forward(layers.EinsumDense("...x,xy->...y", 3), 5, 8) == 2 * 5 * 8 * 3


@pytest.mark.parametrize("precision", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_a_type_changes_no_count(precision: str) -> None:
    assert forward(layers.Dense(5, dtype=precision), 7) == 75


@pytest.mark.parametrize(
    ("layer", "operations"),
    [
        # Positions × filters × the products of a filter at a position. Each product is also added.
        (layers.Conv2D(6, 3, **CONVOLUTION), 2 * (8 * 8) * 6 * (3 * 3 * 4)),
        (layers.Conv2D(6, 3, strides=2, **CONVOLUTION), 2 * (4 * 4) * 6 * (3 * 3 * 4)),
        (layers.Conv2D(6, 3, strides=2, use_bias=False), 2 * (3 * 3) * 6 * (3 * 3 * 4)),
        (layers.Conv2D(6, 3, strides=2), 2 * (3 * 3) * 6 * (3 * 3 * 4) + (3 * 3) * 6),
        (layers.Conv2D(6, 3, dilation_rate=2, **CONVOLUTION), 2 * (8 * 8) * 6 * (3 * 3 * 4)),
        (layers.Conv2D(6, 3, groups=2, **CONVOLUTION), 2 * (8 * 8) * 6 * (3 * 3 * 2)),
        (layers.Conv2D(8, 3, groups=4, strides=2, **CONVOLUTION), 2 * (4 * 4) * 8 * (3 * 3 * 1)),
        (layers.DepthwiseConv2D(3, **CONVOLUTION), 2 * (8 * 8) * 4 * (3 * 3)),
        (layers.DepthwiseConv2D(3, strides=2, **CONVOLUTION), 2 * (4 * 4) * 4 * (3 * 3)),
        (
            layers.DepthwiseConv2D(3, depth_multiplier=2, **CONVOLUTION),
            2 * (8 * 8) * (4 * 2) * (3 * 3),
        ),
        (
            layers.SeparableConv2D(6, 3, **CONVOLUTION),
            2 * (8 * 8) * 4 * (3 * 3) + 2 * (8 * 8) * 6 * 4,
        ),
        # Each of the 8 × 8 × 4 numbers is multiplied 3 × 3 × 6 times.
        (layers.Conv2DTranspose(6, 3, strides=2, **CONVOLUTION), 2 * (8 * 8 * 4) * (3 * 3 * 6)),
    ],
)
def test_convolutions(layer: keras.layers.Layer, operations: int) -> None:
    assert forward(layer, 8, 8, 4) == operations
    assert not tf.config.functions_run_eagerly()


def test_attention() -> None:
    x = keras.Input((16, 8))
    attention = keras.Model(x, layers.MultiHeadAttention(2, 4, use_bias=False)(x, x))
    # The projections are those of query, key, value and output.
    projections = 4 * 2 * 16 * 8 * (2 * 4)
    scores = 2 * 16 * 16
    # The products are the scores, and the values weighted by them.
    products = 2 * 2 * scores * 4
    counted = training_flops(attention, one(16, 8))
    assert counted is not None
    softmax = counted / 3 - projections - products
    assert 0 < softmax <= 6 * scores


def test_embeddings_take_no_products() -> None:
    counted = forward(layers.Embedding(1000, 64), 5, dtype=tf.int32)
    assert counted is not None
    # The few operations check that each index is in the table.
    assert counted <= 2 * 5


def test_an_unrolled_lstm() -> None:
    # Four gates of 4 units have 3 inputs and 4 states.
    products = 2 * (4 * 4) * (3 + 4)
    # The terms are the sum of both products, the bias, f·c + i·g, and o·tanh(c).
    elementwise = (4 * 4) + (4 * 4) + 3 * 4 + 4
    assert forward(layers.LSTM(4, unroll=True), 5, 3) == 5 * (products + elementwise)
    # The profiler counts the body of a loop once, so there is no figure.
    assert forward(layers.LSTM(4), 5, 3) is None


def test_an_einsum_of_one_tensor_multiplies_nothing() -> None:
    class Turned(layers.Layer):
        def call(self, inputs: Any) -> Any:
            return tf.einsum("bij->bji", inputs)

    assert forward(Turned(), 3, 4) == 0


def test_functions_of_a_users_own() -> None:
    class Compiled(layers.Layer):
        @tf.function
        def call(self, inputs: Any) -> Any:
            return tf.matmul(inputs, tf.ones([7, 5]))

    class Loops(layers.Layer):
        @tf.function(autograph=False)
        def call(self, inputs: Any) -> Any:
            return tf.while_loop(lambda x: tf.norm(x) < 9, lambda x: [2 * x], [inputs])[0]

    assert forward(Compiled(), 7) == 2 * 7 * 5
    assert forward(Loops(), 7) is None
    assert not tf.config.functions_run_eagerly()


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_function_without_its_python_is_not_counted(eagerly: bool) -> None:
    product = tf.function(lambda x: tf.matmul(x, tf.ones([7, 5]))).get_concrete_function(
        tf.TensorSpec([1, 7])
    )

    class Saved(layers.Layer):
        def call(self, inputs: Any) -> Any:
            return product(inputs)

        # Without a call, the batch of the spec is 1.
        def compute_output_spec(self, inputs: Any) -> Any:
            return keras.KerasTensor((*inputs.shape[:-1], 5), inputs.dtype)

    tf.config.run_functions_eagerly(eagerly)
    try:
        assert forward(Saved(), 7) is None
        assert tf.config.functions_run_eagerly() == eagerly
    finally:
        tf.config.run_functions_eagerly(False)


def test_counting_draws_no_random_numbers() -> None:
    class Draws(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return inputs * random.random() * np.random.random()

    made = keras.Sequential([keras.Input((3,)), Draws(), keras.layers.Dense(2)])
    random.seed(1)
    np.random.seed(1)
    assert training_flops(made, one(3)) is not None
    after = random.random(), np.random.random()
    random.seed(1)
    np.random.seed(1)
    assert after == (random.random(), np.random.random())
    assert made.losses == []


def test_what_cannot_be_counted_is_left_out() -> None:
    dense = keras.Sequential([keras.layers.Dense(2)])
    assert training_flops(dense, tf.TensorSpec([None, 7, 3])) is None
    assert not dense.built
    dense.build((None, 7, 3))
    assert training_flops(dense, tf.TensorSpec([None, 7, 3])) == 3 * (2 * 7 * 3 * 2 + 7 * 2)
    assert training_flops(dense, tf.TensorSpec([None, None, 3])) is None

    class StepAlone(keras.Model):
        def train_step(self, data: Any) -> Any:
            return {}

    assert training_flops(StepAlone(), one(3)) is None

"""Keras' layers in fewer operations, for steps of prepared models on CPUs.

Each function takes Keras' original function and the arguments of a call. The forward numbers are
those of Keras to the bit. Gradients are the same sums in another order, so they can differ in the
last digit. A function that does not support its inputs calls Keras' original.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfmulti.distribution.custom_gradients import custom_gradient, mark_formula

Original = Callable[..., Any]


def attention(
    original: Original,
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    bias: Any,
    mask: Any,
    is_causal: bool,
    scale: Any,
) -> tf.Tensor:
    """Returns softmax(query · key × scale) · value by matrix products instead of `einsum`.

    The gradient reads the scores once. The softmax gradient needs one sum for each target, and
    that sum follows from the output (Dao et al., FlashAttention, 2022, arXiv:2205.14135, appendix
    B.4).

    Args:
        original: Keras' function, which serves where there is a bias or another type than float32.
        query: (rows, targets, heads, width).
        key: (rows, sources, heads, width).
        value: (rows, sources, heads, width).
        bias: a tensor to be added to the scores, or None.
        mask: True where a target sees a source; (rows, heads or 1, targets or 1, sources).
        is_causal: whether a target sees no source after its own position.
        scale: one number.

    Returns:
        A tensor of shape (rows, targets, heads, width).
    """
    if bias is not None or not query.dtype == key.dtype == value.dtype == tf.float32:
        return original(query, key, value, bias, mask, is_causal, scale)
    seen = _seen(mask, is_causal, query, key)
    scale = tf.cast(scale, query.dtype)

    @custom_gradient
    def attend(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> Any:
        query, key, value = (_heads_first(part) for part in (query, key, value))
        scores = tf.matmul(query, key, transpose_b=True) * scale
        if seen is not None:
            scores = tf.where(seen, scores, NOTHING)
        weights = tf.nn.softmax(scores)
        outputs = tf.matmul(weights, value)

        def gradient(upstream: tf.Tensor) -> list[tf.Tensor]:
            upstream = _heads_first(upstream)
            by_weights = tf.matmul(upstream, value, transpose_b=True)
            sums = tf.reduce_sum(upstream * outputs, -1, keepdims=True)
            by_scores = weights * (by_weights - sums)
            # A target that sees no source has equal weights for all sources, not 0. So the
            # gradient must be masked, too.
            if seen is not None:
                by_scores = tf.where(seen, by_scores, 0.0)
            gradients = (
                tf.matmul(by_scores, key) * scale,
                tf.matmul(by_scores, query, transpose_a=True) * scale,
                tf.matmul(weights, upstream, transpose_a=True),
            )
            return [_heads_first(part) for part in gradients]

        return _heads_first(outputs), gradient

    outputs = attend(query, key, value)
    mark_formula(outputs)
    return outputs


# The score that Keras gives a source that a target does not see.
NOTHING = -0.7 * tf.float32.max


def _heads_first(values: tf.Tensor) -> tf.Tensor:
    """Returns (rows, heads, places, width) of (rows, places, heads, width), or the reverse."""
    return tf.transpose(values, [0, 2, 1, 3])


def _seen(mask: Any, is_causal: bool, query: tf.Tensor, key: tf.Tensor) -> tf.Tensor | None:
    """Returns where a target sees a source, from both masks; None if it sees all."""
    seen = None if mask is None else tf.cast(mask, tf.bool)
    if is_causal:
        all_pairs = tf.ones([tf.shape(query)[1], tf.shape(key)[1]], tf.bool)
        causal = tf.linalg.band_part(all_pairs, -1, 0)[tf.newaxis, tf.newaxis]
        seen = causal if seen is None else tf.logical_and(seen, causal)
    return seen


def layer_norm(original: Original, layer: Any, inputs: Any) -> tf.Tensor:
    """Returns the LayerNormalization of the last axis, with a gradient of four sums.

    The method is that of Ba, Kiros and Hinton, Layer normalization, 2016 (arXiv:1607.06450). Sums
    over the rows add up each example first, which loses fewer digits.

    Args:
        original: Keras' `call`, which serves for other axes, other types and RMS scaling.
        layer: the LayerNormalization.
        inputs: float32, with at least two axes.
    """
    if not _is_known(inputs) or layer.rms_scaling or not _is_last_axis(layer.axis, inputs):
        return original(layer, inputs)
    width = inputs.shape[-1]
    gamma = tf.ones([width]) if layer.gamma is None else tf.convert_to_tensor(layer.gamma)
    beta = tf.zeros([width]) if layer.beta is None else tf.convert_to_tensor(layer.beta)

    @custom_gradient
    def normalize(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> Any:
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        scale = tf.math.rsqrt(variance + layer.epsilon)
        slope = scale * gamma
        outputs = x * slope + (-mean * slope + beta)

        def gradient(upstream: tf.Tensor) -> list[tf.Tensor]:
            shape = tf.shape(x)
            columns = tf.reshape(gamma / width, [width, 1])
            flat = tf.reshape(upstream, [-1, width])
            products = flat * tf.reshape(x - mean, [-1, width])
            inverse = tf.reshape(scale, [-1, 1])
            by_mean = tf.matmul(flat, columns)
            by_variance = tf.matmul(products, columns) * tf.square(inverse)
            # Keras' variance takes the mean for a constant, which counts in gradients of gradients.
            distances = tf.reshape(x - tf.stop_gradient(mean), [-1, width])
            by_x = (flat * gamma - by_mean - distances * by_variance) * inverse
            per_row = [shape[0], -1, width]
            by_gamma = tf.matmul(
                tf.reshape(scale, [shape[0], -1, 1]),
                tf.reshape(products, per_row),
                transpose_a=True,
            )
            by_beta = tf.reduce_sum(tf.reduce_sum(tf.reshape(flat, per_row), 1), 0)
            return [tf.reshape(by_x, shape), tf.reduce_sum(by_gamma, [0, 1]), by_beta]

        return outputs, gradient

    outputs = normalize(inputs, gamma, beta)
    mark_formula(outputs)
    return outputs


def _is_last_axis(axis: Any, inputs: tf.Tensor) -> bool:
    axes = list(axis) if isinstance(axis, (list, tuple)) else [axis]
    return axes in ([-1], [inputs.shape.rank - 1])


def _is_known(inputs: Any) -> bool:
    """Returns whether inputs are float32 with at least two axes and a known last axis."""
    if not isinstance(inputs, tf.Tensor) or inputs.dtype != tf.float32:
        return False
    return bool((inputs.shape.rank or 0) > 1 and inputs.shape[-1])


def dense(original: Original, layer: Any, inputs: Any, training: Any = None) -> tf.Tensor:
    """Returns Dense of inputs with more than two axes by one product of two matrices.

    Args:
        original: Keras' `call`, which serves for two axes, and for other types or kernels.
        layer: the Dense layer.
        inputs: float32, (rows, …, width).
        training: passed on to Keras' `call`.
    """
    if not _is_known(inputs) or inputs.shape.rank == 2:
        return original(layer, inputs, training=training)
    outputs = _product(layer, inputs, 1)
    return original(layer, inputs, training=training) if outputs is None else outputs


def einsum_dense(original: Original, layer: Any, inputs: Any, training: Any = None) -> tf.Tensor:
    """Returns EinsumDense by one product of two matrices, where its equation allows that.

    The inputs' last axes must be the kernel's first, and the kernel's other axes the output's last.
    The projections of MultiHeadAttention have that form.

    Args:
        original: Keras' `call`, which serves for other equations and types.
        layer: the EinsumDense layer.
        inputs: float32, with at least two axes.
        training: passed on to Keras' `call`.
    """
    summed = _summed_axes(layer.equation)
    outputs = _product(layer, inputs, summed) if summed and _is_known(inputs) else None
    return original(layer, inputs, training=training) if outputs is None else outputs


def _product(layer: Any, inputs: tf.Tensor, summed: int) -> tf.Tensor | None:
    """Returns a layer's outputs, or None where its kernel or bias has another form.

    The last `summed` axes of the inputs must be the first of the kernel. All other axes become the
    rows of one matrix. TensorFlow adds the bias, and applies a ReLU, while it writes the product.
    """
    bias, activation = layer.bias, layer.activation
    input_sizes, output_sizes = list(layer.kernel.shape[:summed]), list(layer.kernel.shape[summed:])
    fits = layer.compute_dtype == inputs.dtype and list(inputs.shape[-summed:]) == input_sizes
    if not fits or (bias is not None and list(bias.shape) != output_sizes):
        return None
    kernel = tf.reshape(
        tf.convert_to_tensor(layer.kernel), [math.prod(input_sizes), math.prod(output_sizes)]
    )
    outputs = tf.matmul(tf.reshape(inputs, [-1, math.prod(input_sizes)]), kernel)
    if bias is not None:
        outputs = tf.nn.bias_add(outputs, tf.reshape(tf.convert_to_tensor(bias), [-1]))
    if activation is keras.activations.relu:
        activation, outputs = None, tf.nn.relu(outputs)
    shape = tf.concat([tf.shape(inputs)[:-summed], output_sizes], 0)
    outputs = tf.ensure_shape(tf.reshape(outputs, shape), [*inputs.shape[:-summed], *output_sizes])
    return outputs if activation is None else activation(outputs)


def _summed_axes(equation: str) -> int:
    """Returns how many last axes of the inputs an equation sums over, or 0 for another form.

    >>> _summed_axes("abc,cde->abde"), _summed_axes("abcd,cde->abe"), _summed_axes("abc,bd->acd")
    (1, 2, 0)
    """
    inputs, _, rest = equation.replace(" ", "").replace("...", "").partition(",")
    kernel, _, outputs = rest.partition("->")
    summed = sum(letter not in outputs for letter in inputs)
    kept = inputs[: len(inputs) - summed]
    product = bool(summed) and kernel[:summed] == inputs[len(kept) :]
    return summed if product and outputs == kept + kernel[summed:] else 0


# The function that replaces `call` of each of Keras' layers.
LAYERS: dict[type[keras.layers.Layer], Callable[..., Any]] = {
    keras.layers.LayerNormalization: layer_norm,
    keras.layers.Dense: dense,
    keras.layers.EinsumDense: einsum_dense,
}

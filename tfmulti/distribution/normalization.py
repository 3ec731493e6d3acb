"""BatchNormalization with the statistics of the global batch.

Replica `r` has for each channel the count `c_r` of its values, their mean `m_r`, and the sum `s_r`
of their squared distances to that mean. One collective gathers the three from all replicas. They
are merged as by Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing
sample variances, 1979:

    c = sum of c_r
    mean = (sum of c_r * m_r) / c
    variance = (sum of s_r + sum of c_r * (m_r - mean)^2) / c

This loses no digits where the mean is large. The gradient takes a second collective.

Keras' own `synchronized=True` takes three collectives forward and three backward, and begins with
sums of squares. It also counts the filler row that a replica without rows computes. Its gradient
gives all replicas the same weight, even if they have different numbers of rows.

The gradient of `normalized` is one fused kernel, plus the part of mean and variance. The gradient
of Keras' separate operations reads the values many times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfmulti.distribution import replica_context
from tfmulti.distribution.custom_gradients import custom_gradient
from tfmulti.distribution.replica_slice import ReplicaSlice


def normalized(
    replica_slice: ReplicaSlice, x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns normalized values, and the count, mean and variance that they were normalized by.

    These three are for each channel, over the rows of all replicas, or over the rows of `x` alone
    if `replica_slice` is the whole batch. The variance is Keras', without Bessel's correction.

    Args:
        replica_slice: this replica's slice.
        x: this replica's values, float32, with the channels on the last axis.
        gamma: the factor of each normalized channel.
        beta: the number that is then added to each channel.
        epsilon: the number that is added to the variance.
    """
    is_image = x.shape.rank == 4
    shape = tf.shape(x)
    rows = [shape[0], tf.reduce_prod(shape[1:-1]), 1, x.shape[-1]]

    x = x if is_image else tf.reshape(x, rows)
    # The statistics are computed outside the function with the custom gradient. If the step used
    # a second result of that function, TensorFlow would not fuse an operation that follows, such as
    # a sum or a ReLU, with the kernel that computes `y`.
    moments = _moments if is_image else _keras_moments
    count, mean, variance = _statistics(replica_slice, x, moments)

    @custom_gradient
    def normalize(*arguments: tf.Tensor) -> Any:
        x, gamma, beta, mean, variance = arguments

        def gradient(dy: tf.Tensor) -> tuple[tf.Tensor | None, ...]:
            merged = (count, mean, variance)
            if replica_slice.is_whole:
                gradients = _gradients(dy, x, gamma, merged, epsilon, is_training=True)
            else:
                gradients = _gradients_of_slice(replica_slice, dy, x, gamma, merged, epsilon)
            # The gradient of `x` contains what mean and variance add.
            return (*gradients, None, None)

        if is_image:
            scale = gamma * tf.math.rsqrt(variance + epsilon)
            return _scaled(x, scale, beta - mean * scale), gradient
        return tf.nn.batch_normalization(x, mean, variance, beta, gamma, epsilon), gradient

    y = normalize(x, gamma, beta, mean, variance)
    return y if is_image else tf.reshape(y, shape), count, mean, variance


Moments = Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]


@tf.function(autograph=False)  # type: ignore[untyped-decorator]
def _moments(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and variance of each channel of images, from the means of each image.

    This is faster than one mean over all values, and loses fewer digits. For few channels, the
    squares are summed by a product of matrices, which reads the values once. If the mean is so
    large that its square would cost the variance digits, the squared distances to the mean are
    summed instead.
    """
    mean = tf.reduce_mean(tf.reduce_mean(x, [1, 2]), 0)

    def by_distances() -> tf.Tensor:
        squares = tf.math.squared_difference(x, mean)
        return tf.reduce_mean(tf.reduce_mean(squares, [1, 2]), 0)

    channels, shape = x.shape[-1], tf.shape(x)
    if channels > SQUARED_BY_PRODUCT:
        return mean, by_distances()
    positions = shape[1] * shape[2]
    rows = tf.reshape(x, [shape[0], positions, channels])
    products = tf.linalg.diag_part(tf.matmul(rows, rows, transpose_a=True))
    square = tf.square(mean)
    variance = tf.reduce_mean(products, 0) / tf.cast(positions, x.dtype) - square
    exact = tf.reduce_all(square <= 4.0 * variance)
    return mean, tf.cond(exact, lambda: variance, by_distances)


def _keras_moments(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and variance of each channel, as Keras computes them."""
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    return mean, variance


def _statistics(
    replica_slice: ReplicaSlice, x: tf.Tensor, moments: Moments
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns count, mean and variance of each channel over the rows of all replicas."""
    mean, variance = moments(x)
    values = tf.size(x, tf.int64) // x.shape[-1]
    count = tf.fill(tf.shape(mean), tf.cast(values, x.dtype))
    if replica_slice.is_whole:
        return count, mean, variance
    count *= tf.cast(replica_slice.own_rows > 0, x.dtype)
    mean, variance = (tf.math.multiply_no_nan(part, tf.sign(count)) for part in (mean, variance))
    return _merged(replica_slice, count, mean, variance * count)


def _scaled(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor) -> tf.Tensor:
    """Returns `scale * x + offset` for each channel, and reads `x` once.

    For few channels this is a 1x1 convolution, with which TensorFlow fuses an addition that
    follows.
    """
    if x.shape[-1] <= SCALED_BY_CONVOLUTION:
        filters = tf.linalg.diag(scale)[tf.newaxis, tf.newaxis]
        return tf.nn.bias_add(tf.nn.conv2d(x, filters, 1, "VALID"), offset)
    fused = tf.raw_ops.FusedBatchNormV3(
        x=x,
        scale=scale,
        offset=offset,
        mean=tf.zeros_like(scale),
        variance=tf.ones_like(scale) - _EPSILON,
        epsilon=_EPSILON,
        is_training=False,
    )
    return fused.y


# Up to this number of channels, a convolution costs less than the kernel that normalizes.
SCALED_BY_CONVOLUTION = 64
# Up to this number of channels, a product of matrices costs less than another pass over the values.
SQUARED_BY_PRODUCT = 32
# `_scaled` gives the kernel the variance 1 - epsilon, so that it divides by 1.
_EPSILON = 2.0**-10

Gradients = tuple[tf.Tensor, tf.Tensor, tf.Tensor]


def _gradients_of_slice(
    replica_slice: ReplicaSlice,
    dy: tf.Tensor,
    x: tf.Tensor,
    gamma: tf.Tensor,
    statistics: tuple[tf.Tensor, tf.Tensor, tf.Tensor],
    epsilon: float,
) -> Gradients:
    """Returns this replica's gradients with respect to `x`, `gamma` and `beta`.

    Source: Ioffe and Szegedy, Batch normalization, 2015 (arXiv:1502.03167), section 3.

    Args:
        replica_slice: this replica's slice.
        dy: this replica's gradient with respect to the normalized values.
        x: this replica's values.
        gamma: the factor of each channel.
        statistics: count, mean and variance of the global batch.
        epsilon: the number that is added to the variance.
    """
    total, mean, variance = statistics
    # These gradients treat mean and variance as constants. The gradient that flows through both of
    # them is added below.
    dx, dgamma, dbeta = _gradients(dy, x, gamma, statistics, epsilon, is_training=False)
    # The loss of each replica depends on the rows of all replicas, and is weighted by the weight of
    # its replica. `reduce_gradients` will multiply the result by this replica's weight, which is 0
    # without rows.
    weight = tf.cast(replica_slice.weight, x.dtype)
    sums = replica_context.global_gradient(replica_slice, tf.stack([dgamma, dbeta]))
    global_dgamma, global_dbeta = tf.unstack(tf.math.divide_no_nan(sums, weight))
    inverse = tf.math.rsqrt(variance + epsilon)
    scale = tf.math.divide_no_nan(gamma * inverse * inverse * global_dgamma, total)
    offset = tf.math.divide_no_nan(gamma * inverse * global_dbeta, total)
    offset -= scale * tf.stop_gradient(mean)
    return _scaled(x, -scale, -offset) + dx, dgamma, dbeta


def _gradients(
    dy: tf.Tensor,
    x: tf.Tensor,
    gamma: tf.Tensor,
    statistics: tuple[tf.Tensor, tf.Tensor, tf.Tensor],
    epsilon: float,
    *,
    is_training: bool,
) -> Gradients:
    """Returns the gradients that TensorFlow's fused kernel computes.

    The second derivative is that of Keras' operations. They take the mean for a constant where the
    variance is derived (`tf.nn.moments`). The kernel's own second derivative does not, and leaves
    out mean and variance if these are constants.

    Args:
        dy: the gradient with respect to the normalized values.
        x: the values.
        gamma: the factor of each channel.
        statistics: count, mean and variance.
        epsilon: the number that is added to the variance.
        is_training: whether mean and variance depend on the values.
    """
    count, mean, variance = statistics

    @custom_gradient
    def gradients(*arguments: tf.Tensor) -> Any:
        dy, x, gamma, mean, variance = arguments
        fused = tf.raw_ops.FusedBatchNormGradV3(
            y_backprop=dy,
            x=x,
            scale=gamma,
            reserve_space_1=mean,
            reserve_space_2=variance,
            reserve_space_3=[],
            epsilon=epsilon,
            is_training=is_training,
        )

        def second(*upstream: tf.Tensor) -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                tape.watch(arguments)
                scale = tf.math.rsqrt(variance + epsilon)
                of_scaled = dy * (x - mean) * scale
                dgamma, dbeta = (tf.reduce_sum(part, [0, 1, 2]) for part in (of_scaled, dy))
                dx = dy * (gamma * scale)
                if is_training:
                    distances = (x - tf.stop_gradient(mean)) * scale
                    dx -= gamma * scale * (dbeta + distances * dgamma) / count
            second_gradients: list[tf.Tensor] = tape.gradient(
                (dx, dgamma, dbeta), arguments, upstream
            )
            return second_gradients

        return (fused.x_backprop, fused.scale_backprop, fused.offset_backprop), second

    dx, dgamma, dbeta = gradients(dy, x, gamma, mean, variance)
    return dx, dgamma, dbeta


def global_moments(
    replica_slice: ReplicaSlice, x: tf.Tensor, mask: tf.Tensor | None, axes: Sequence[int]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and variance over the given axes and the rows of all replicas.

    Args:
        replica_slice: this replica's slice.
        x: this replica's values, in a floating point type of 32 bits or more.
        mask: which values count, with the shape of `x` without its last axis; None means all.
        axes: the axes to reduce; the first one is that of the rows.
    """
    counts = tf.ones_like(x) if mask is None else tf.cast(mask, x.dtype)[..., tf.newaxis]
    counts = counts * tf.cast(replica_slice.own_rows > 0, x.dtype)
    counts = tf.broadcast_to(counts, tf.shape(x))
    axes = list(axes)

    @custom_gradient
    def moments(x: tf.Tensor) -> Any:
        count = tf.reduce_sum(counts, axes, keepdims=True)
        mean = tf.math.divide_no_nan(tf.reduce_sum(x * counts, axes, keepdims=True), count)
        squares = tf.reduce_sum(tf.square(x - mean) * counts, axes, keepdims=True)
        total, mean, variance = _merged(replica_slice, count, mean, squares)

        def gradient(
            _: tf.Tensor, mean_upstream: tf.Tensor, variance_upstream: tf.Tensor
        ) -> tf.Tensor:
            # The loss of each replica depends on the rows of all replicas, and is weighted by the
            # weight of its replica. `reduce_gradients` will multiply the result by this replica's
            # weight.
            weight = tf.cast(replica_slice.weight, x.dtype)
            upstream = tf.stack(
                [tf.reshape(mean_upstream, [-1]), tf.reshape(variance_upstream, [-1])]
            )
            of_all = replica_context.global_gradient(replica_slice, upstream)
            by_mean, by_variance = tf.unstack(of_all)
            by_mean, by_variance = (
                tf.math.divide_no_nan(tf.reshape(part, tf.shape(mean)), total)
                for part in (by_mean, by_variance)
            )
            # As in `tf.nn.moments`, the mean is a constant here in gradients of gradients.
            gradient_of_x = by_mean + by_variance * 2.0 * (x - tf.stop_gradient(mean))
            return tf.math.divide_no_nan(gradient_of_x * counts, weight)

        squeezed = [tf.squeeze(value, axes) for value in (total, mean, variance)]
        return squeezed, gradient

    total, mean, variance = moments(x)
    if mask is None:
        return mean, variance
    # Keras' layer adds a small number to the count of the values, which float64 shows.
    share = total / (total + keras.config.epsilon())
    return share * mean, share * (variance + tf.square(mean - share * mean))


def _merged(
    replica_slice: ReplicaSlice, count: tf.Tensor, mean: tf.Tensor, squares: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns count, mean and variance over all replicas, from one collective."""
    merged: tuple[tf.Tensor, tf.Tensor, tf.Tensor] = _merge(
        replica_context.stack_over_replicas(replica_slice, tf.stack([count, mean, squares]))
    )
    return merged


# As a tf.function it is traced once for all layers with the same shape. So the first step of a
# model with many layers takes a second less.
@tf.function(autograph=False)  # type: ignore[untyped-decorator]
def _merge(of_replicas: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the merged statistics from `[replicas, (count, mean, squared distances), ...]`."""
    counts, means, squares = tf.unstack(of_replicas, axis=1)
    total = tf.reduce_sum(counts, 0)
    mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), total)
    between = tf.reduce_sum(counts * tf.square(means - mean), 0)
    variance = tf.math.divide_no_nan(tf.reduce_sum(squares, 0) + between, total)
    return total, mean, variance

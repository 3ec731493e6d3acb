"""BatchNormalization over the rows of all replicas: the statistics of the global batch.

Keras' own `synchronized=True` reduces three times forward and three times backward, from
sums of squares; it counts the row that a replica without rows reads, and where replicas
have different numbers of rows its gradient weighs them alike. Here each replica's count,
mean and sum of squared distances travel together, once each way, and are merged as Chan,
Golub and LeVeque do (Updating formulae and a pairwise algorithm for computing sample
variances, 1979), which loses no digits where the mean is large.

A layer's gradient is one fused kernel and what mean and variance add to it, where that of Keras'
single operations reads the values many times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmulti.distribution import replica_context
from tfmulti.distribution.replica_slice import ReplicaSlice


def normalized(
    share: ReplicaSlice, x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns normalized values, and count, mean and variance of what they were normalized by.

    Those of each channel, of all rows that the share stands for: of all replicas, unless it is
    the whole. The variance is Keras', without Bessel's correction.

    Args:
        x: this share's values, float32; the last axis is that of the channels.
        gamma: what each channel is multiplied by.
        beta: what is then added to each.
    """
    of_images = x.shape.rank == 4
    form = tf.shape(x)
    rows = [form[0], tf.reduce_prod(form[1:-1]), 1, x.shape[-1]]

    x = x if of_images else tf.reshape(x, rows)
    # Not within the function that has its own gradient: if more of it were used than `y`,
    # TensorFlow would not draw what follows (a sum, a rectifier) into the kernel that makes `y`.
    found = count, *_ = _statistics(share, x, _moments if of_images else _keras_moments)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def normalize(*given: tf.Tensor) -> Any:
        x, gamma, beta, mean, variance = given

        def gradient(dy: tf.Tensor) -> tuple[tf.Tensor | None, ...]:
            of = (count, mean, variance)
            if share.is_whole:
                found = _kernel_gradients(dy, x, gamma, of, epsilon, is_training=True)
            else:
                found = _gradients_of_share(share, dy, x, gamma, of, epsilon)
            return (*found, None, None)  # what mean and variance add is in that of `x`

        if of_images:
            slope = gamma * tf.math.rsqrt(variance + epsilon)
            return _scaled(x, slope, beta - mean * slope), gradient
        return tf.nn.batch_normalization(x, mean, variance, beta, gamma, epsilon), gradient

    y = normalize(x, gamma, beta, *found[1:])
    return (y if of_images else tf.reshape(y, form), *found)


Moments = Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]


@tf.function(autograph=False)  # type: ignore[untyped-decorator]
def _moments(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and variance of each channel of images: of each image first.

    That is faster than over all at once, and loses fewer digits of the many values. Of few
    channels the squares are summed by a product of matrices, which reads the values once; where a
    mean is so large that its square would cost the variance digits, distances to it are summed.
    """
    mean = tf.reduce_mean(tf.reduce_mean(x, [1, 2]), 0)

    def by_distances() -> tf.Tensor:
        squares = tf.math.squared_difference(x, mean)
        return tf.reduce_mean(tf.reduce_mean(squares, [1, 2]), 0)

    channels, form = x.shape[-1], tf.shape(x)
    if channels > SQUARED_BY_PRODUCT:
        return mean, by_distances()
    values = form[1] * form[2]
    rows = tf.reshape(x, [form[0], values, channels])
    products = tf.linalg.diag_part(tf.matmul(rows, rows, transpose_a=True))
    square = tf.square(mean)
    variance = tf.reduce_mean(products, 0) / tf.cast(values, x.dtype) - square
    exact = tf.reduce_all(square <= 4.0 * variance)
    return mean, tf.cond(exact, lambda: variance, by_distances)


def _keras_moments(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    return mean, variance


def _statistics(
    share: ReplicaSlice, x: tf.Tensor, moments: Moments
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns count, mean and variance of each channel over the rows of all."""
    mean, variance = moments(x)
    values = tf.size(x, tf.int64) // x.shape[-1]
    count = tf.fill(tf.shape(mean), tf.cast(values, x.dtype))
    if share.is_whole:
        return count, mean, variance
    count *= tf.cast(share.own_rows > 0, x.dtype)
    mean, variance = (tf.math.multiply_no_nan(part, tf.sign(count)) for part in (mean, variance))
    return _merged(count, mean, variance * count)


def _scaled(x: tf.Tensor, slope: tf.Tensor, level: tf.Tensor) -> tf.Tensor:
    """Returns `slope * x + level`, channel by channel, reading `x` once.

    Of few channels by a convolution of 1x1, into which TensorFlow draws what is then added.
    """
    if x.shape[-1] <= SCALED_BY_CONVOLUTION:
        filters = tf.linalg.diag(slope)[tf.newaxis, tf.newaxis]
        return tf.nn.bias_add(tf.nn.conv2d(x, filters, 1, "VALID"), level)
    found = tf.raw_ops.FusedBatchNormV3(
        x=x,
        scale=slope,
        offset=level,
        mean=tf.zeros_like(slope),
        variance=tf.ones_like(slope) - _EPSILON,
        epsilon=_EPSILON,
        is_training=False,
    )
    return found.y


SCALED_BY_CONVOLUTION = 64  # up to which a convolution costs less than the kernel that normalizes
SQUARED_BY_PRODUCT = (
    32  # up to which a product of matrices costs less than another pass over the values
)
_EPSILON = 2.0**-10  # of a kernel that shall divide by 1

Gradients = tuple[tf.Tensor, tf.Tensor, tf.Tensor]


def _gradients_of_share(
    share: ReplicaSlice,
    dy: tf.Tensor,
    x: tf.Tensor,
    gamma: tf.Tensor,
    statistics: tuple[tf.Tensor, tf.Tensor, tf.Tensor],
    epsilon: float,
) -> Gradients:
    """Returns the gradients of values, `gamma` and `beta`, as they stand for this share.

    Ioffe and Szegedy, Batch normalization, 2015 (arXiv:1502.03167), section 3.
    """
    total, mean, variance = statistics
    # As if mean and variance were numbers; what they add follows.
    dx, dgamma, dbeta = _frozen_gradients(dy, x, gamma, mean, variance, epsilon)
    # Each replica's loss depends on the rows of all, and counts by its weight; what is returned
    # here will be weighed by this replica's (without rows by 0).
    weight = tf.cast(share.weight, x.dtype)
    sums = tf.math.multiply_no_nan(tf.stack([dgamma, dbeta]), weight)
    of_all = replica_context.total(sums)
    by_gamma, by_beta = tf.unstack(tf.math.divide_no_nan(of_all, weight))
    scale = tf.math.rsqrt(variance + epsilon)
    slope = tf.math.divide_no_nan(gamma * scale * scale * by_gamma, total)
    level = tf.math.divide_no_nan(gamma * scale * by_beta, total) - slope * mean
    return _scaled(x, -slope, -level) + dx, dgamma, dbeta


def _frozen_gradients(
    dy: tf.Tensor,
    x: tf.Tensor,
    gamma: tf.Tensor,
    mean: tf.Tensor,
    variance: tf.Tensor,
    epsilon: float,
) -> Gradients:
    """Returns the gradients as if mean and variance were numbers.

    The kernel's own derivative leaves these two out, so a second one is that of the formula.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def frozen(*given: tf.Tensor) -> Any:
        dy, x, gamma, mean, variance = given
        found = _kernel_gradients(dy, x, gamma, (mean, mean, variance), epsilon, is_training=False)

        def second(*upstream: tf.Tensor) -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                tape.watch(given)
                scale = tf.math.rsqrt(variance + epsilon)
                normal = (x - mean) * scale
                sums = (tf.reduce_sum(part, [0, 1, 2]) for part in (dy * normal, dy))
                formula = (dy * (gamma * scale), *sums)
            found: list[tf.Tensor] = tape.gradient(formula, given, upstream)
            return found

        return found, second

    dx, dgamma, dbeta = frozen(dy, x, gamma, mean, variance)
    return dx, dgamma, dbeta


def _kernel_gradients(
    dy: tf.Tensor,
    x: tf.Tensor,
    gamma: tf.Tensor,
    statistics: tuple[tf.Tensor, tf.Tensor, tf.Tensor],
    epsilon: float,
    *,
    is_training: bool,
) -> Gradients:
    _, mean, variance = statistics
    found = tf.raw_ops.FusedBatchNormGradV3(
        y_backprop=dy,
        x=x,
        scale=gamma,
        reserve_space_1=mean,
        reserve_space_2=variance,
        reserve_space_3=[],
        epsilon=epsilon,
        is_training=is_training,
    )
    return found.x_backprop, found.scale_backprop, found.offset_backprop


def global_moments(
    share: ReplicaSlice, x: tf.Tensor, mask: tf.Tensor | None, axes: Sequence[int]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and variance over the given axes and the rows of all replicas.

    Args:
        x: this share's values, a floating point type of 32 bits or more.
        mask: what counts, of the shape of `x` without its last axis; None: all.
        axes: those that are reduced; the first is that of the rows.
    """
    counts = tf.ones_like(x) if mask is None else tf.cast(mask, x.dtype)[..., tf.newaxis]
    counts = counts * tf.cast(share.own_rows > 0, x.dtype)
    counts = tf.broadcast_to(counts, tf.shape(x))
    axes = list(axes)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def moments(x: tf.Tensor) -> Any:
        count = tf.reduce_sum(counts, axes, keepdims=True)
        mean = tf.math.divide_no_nan(tf.reduce_sum(x * counts, axes, keepdims=True), count)
        squares = tf.reduce_sum(tf.square(x - mean) * counts, axes, keepdims=True)
        total, mean, variance = _merged(count, mean, squares)

        def gradient(mean_upstream: tf.Tensor, variance_upstream: tf.Tensor) -> tf.Tensor:
            # Each replica's loss depends on the rows of all, and counts by its weight; what
            # is returned here will be weighed by this replica's.
            weight = tf.cast(share.weight, x.dtype)
            upstream = tf.math.multiply_no_nan(
                tf.stack([tf.reshape(mean_upstream, [-1]), tf.reshape(variance_upstream, [-1])]),
                weight,
            )
            by_mean, by_variance = tf.unstack(replica_context.total(upstream))
            by_mean, by_variance = (
                tf.math.divide_no_nan(tf.reshape(part, tf.shape(mean)), total)
                for part in (by_mean, by_variance)
            )
            whole = by_mean + by_variance * 2.0 * (x - mean)
            return tf.math.divide_no_nan(whole * counts, weight)

        return (tf.squeeze(mean, axes), tf.squeeze(variance, axes)), gradient

    mean, variance = moments(x)
    return mean, variance


def _merged(
    count: tf.Tensor, mean: tf.Tensor, squares: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns count, mean and variance over all replicas, from one collective."""
    found: tuple[tf.Tensor, tf.Tensor, tf.Tensor] = _of_all(
        replica_context.of_each(tf.stack([count, mean, squares]))
    )
    return found


# Functions of TensorFlow: what all layers of one form do is traced once, which takes a step of many
# layers a second less.
@tf.function(autograph=False)  # type: ignore[untyped-decorator]
def _of_all(everyone: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns count, mean and variance, out of the replicas' counts, means and sums of squares."""
    counts, means, squares = tf.unstack(everyone, axis=1)
    total = tf.reduce_sum(counts, 0)
    mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), total)
    between = tf.reduce_sum(counts * tf.square(means - mean), 0)
    variance = tf.math.divide_no_nan(tf.reduce_sum(squares, 0) + between, total)
    return total, mean, variance

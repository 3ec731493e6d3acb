"""BatchNormalization over the rows of all replicas: the statistics of the global batch.

Keras' own `synchronized=True` reduces three times forward and three times backward, from
sums of squares; it counts the row that a replica without rows reads, and where replicas
have different numbers of rows its gradient weighs them alike. Here each replica's count,
mean and sum of squared distances travel together, once each way, and are merged as Chan,
Golub and LeVeque do (Updating formulae and a pairwise algorithm for computing sample
variances, 1979), which loses no digits where the mean is large.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmulti.replicas import SUM
from tfmulti.share import Share


def global_moments(
    share: Share, x: tf.Tensor, mask: tf.Tensor | None, axes: Sequence[int]
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
            context = tf.distribute.get_replica_context()
            upstream = tf.math.multiply_no_nan(
                tf.stack([tf.reshape(mean_upstream, [-1]), tf.reshape(variance_upstream, [-1])]),
                weight,
            )
            by_mean, by_variance = tf.unstack(context.all_reduce(SUM, upstream))
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
    context = tf.distribute.get_replica_context()
    replicas = context.num_replicas_in_sync
    own = tf.stack([count, mean, squares])
    place = tf.one_hot(context.replica_id_in_sync_group, replicas, dtype=own.dtype)
    everyone = context.all_reduce(SUM, tf.tensordot(place, own, axes=0))  # [replicas, 3, …]
    counts, means, squares = tf.unstack(everyone, axis=1)
    total = tf.reduce_sum(counts, 0)
    mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), total)
    between = tf.reduce_sum(counts * tf.square(means - mean), 0)
    variance = tf.math.divide_no_nan(tf.reduce_sum(squares, 0) + between, total)
    return total, mean, variance

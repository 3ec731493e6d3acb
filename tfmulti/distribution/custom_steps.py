"""TensorFlow's functions for training steps of the user's own, as a share must have them.

They were made for loops in which each replica's gradients are summed as they are. In a
prepared model's step gradients meet as a mean over rows, so these must do otherwise (see
TensorFlow's guide "Custom training with tf.distribute.Strategy").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmulti.distribution.losses import in_passes
from tfmulti.distribution.replica_context import reduce_gradients
from tfmulti.distribution.replica_slice import ReplicaSlice
from tfmulti.errors import ModelError

Original = Callable[..., Any]


def average_loss(
    original: Original,
    share: ReplicaSlice,
    per_example_loss: Any,
    sample_weight: Any = None,
    global_batch_size: Any = None,
) -> tf.Tensor:
    """Returns the share's losses, summed, over the rows: its own, or those the user names."""
    total = original(per_example_loss, sample_weight, 1)
    if global_batch_size is None:
        return total / tf.cast(tf.maximum(share.own_rows, 1), total.dtype)
    part = tf.cast(share.part, total.dtype) * tf.cast(global_batch_size, total.dtype)
    return tf.math.divide_no_nan(total, part)


def regularization_loss(
    original: Original, share: ReplicaSlice, regularization_loss: Any
) -> tf.Tensor:
    """Returns the sum: it is the same on all replicas, and so is its mean."""
    return tf.reduce_sum(regularization_loss)


def clip_by_global_norm(
    original: Original, share: ReplicaSlice, t_list: Any, clip_norm: Any, *args: Any, **kwargs: Any
) -> Any:
    """Clips the gradients of the global batch; the optimizer's mean of them changes nothing."""
    return original(_global(t_list), clip_norm, *args, **kwargs)


def global_norm(
    original: Original, share: ReplicaSlice, t_list: Any, *args: Any, **kwargs: Any
) -> Any:
    """Returns the norm of the gradients of the global batch."""
    return original(_global(t_list), *args, **kwargs)


def _global(gradients: Any) -> list[Any]:
    if in_passes():
        raise ModelError(
            "the train_step clips gradients by itself, or asks for their norm, which "
            "--microbatches knows only after the last pass. Give global_clipnorm= to the "
            "optimizer instead, or leave --microbatches out."
        )
    return reduce_gradients(gradients)


FUNCTIONS: list[tuple[Any, str, Callable[..., Any]]] = [
    (tf.nn, "compute_average_loss", average_loss),
    (tf.nn, "scale_regularization_loss", regularization_loss),
    (tf, "clip_by_global_norm", clip_by_global_norm),
    (tf.linalg, "global_norm", global_norm),
]

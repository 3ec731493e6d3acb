"""TensorFlow's functions for custom training steps, as a replica slice needs them.

TensorFlow made these functions for loops that sum the replicas' gradients as they are (see
TensorFlow's guide "Custom training with tf.distribute.Strategy"). In a prepared model's step the
gradient is a mean over the rows of the global batch. So the functions here scale losses to this
replica's rows, and reduce gradients over all replicas before they look at them.

Each function takes TensorFlow's own function, the replica slice, and then the arguments of the
user.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmulti.distribution.global_values import are_known, note_unknown, of_one_device
from tfmulti.distribution.losses import in_passes
from tfmulti.distribution.replica_context import reduce_gradients
from tfmulti.distribution.replica_slice import ReplicaSlice
from tfmulti.distribution.row_labels import label_of
from tfmulti.distribution.row_rules import Kind
from tfmulti.errors import ModelError

Original = Callable[..., Any]


def average_loss(
    original: Original,
    replica_slice: ReplicaSlice,
    per_example_loss: Any,
    sample_weight: Any = None,
    global_batch_size: Any = None,
) -> tf.Tensor:
    """Returns the sum of this replica's losses, divided as on one device.

    TensorFlow's function also divides by the number of replicas. Without `global_batch_size` the
    divisor here is the number of this replica's rows, so the result is a mean over rows. With it
    the result is a sum over rows divided by a number, as a program may write it by itself.

    Args:
        original: `tf.nn.compute_average_loss`.
        replica_slice: this replica's slice.
        per_example_loss: the losses of this replica's rows.
        sample_weight: the weights of these losses, or None.
        global_batch_size: the number of rows that the user divides by, or None.
    """
    if global_batch_size is None:
        global_batch_size = tf.maximum(replica_slice.own_rows, 1)
    return original(per_example_loss, sample_weight, global_batch_size)


def regularization_loss(
    original: Original, replica_slice: ReplicaSlice, regularization_loss: Any
) -> tf.Tensor:
    """Returns the sum of regularization losses.

    It is the same on all replicas, so it is also the mean over the replicas.

    Args:
        original: `tf.nn.scale_regularization_loss`, which is not called.
        replica_slice: this replica's slice.
        regularization_loss: one or more losses.
    """
    return tf.reduce_sum(regularization_loss)


def clip_by_global_norm(
    original: Original,
    replica_slice: ReplicaSlice,
    t_list: Any,
    clip_norm: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Returns the gradients of the global batch, clipped, and their norm.

    The optimizer later takes the mean of the replicas' gradients, which are the same already.

    Args:
        original: `tf.clip_by_global_norm`.
        replica_slice: this replica's slice.
        t_list: this replica's gradients.
        clip_norm: the largest norm.
        *args: further arguments of `original`.
        **kwargs: further arguments of `original`.

    Raises:
        ModelError: the step takes several passes (microbatches).
    """
    return original(_global(replica_slice, t_list), clip_norm, *args, **kwargs)


def global_norm(
    original: Original, replica_slice: ReplicaSlice, t_list: Any, *args: Any, **kwargs: Any
) -> Any:
    """Returns the norm of the gradients of the global batch.

    Args:
        original: `tf.linalg.global_norm`.
        replica_slice: this replica's slice.
        t_list: this replica's gradients.
        *args: further arguments of `original`.
        **kwargs: further arguments of `original`.

    Raises:
        ModelError: the step takes several passes (microbatches).
    """
    return original(_global(replica_slice, t_list), *args, **kwargs)


def _global(replica_slice: ReplicaSlice, gradients: Any) -> list[Any]:
    """Returns the gradients of the global batch.

    The mean over the replicas is that of a gradient as the tape gives it. A gradient that the step
    has clipped or normalized before is computed again from global values.
    """
    if in_passes():
        raise ModelError(
            "the train_step clips gradients by itself, or asks for their norm, which "
            "--microbatches knows only after the last pass. Give global_clipnorm= to the "
            "optimizer instead, or leave --microbatches out."
        )
    found: list[Any] = list(gradients)
    means = [i for i, gradient in enumerate(found) if _is_mean(replica_slice, gradient)]
    reduced = reduce_gradients([found[i] for i in means]) if means else []
    for i, gradient in zip(means, reduced, strict=True):
        found[i] = gradient
    for i in set(range(len(found))) - set(means):
        found[i] = of_one_device(replica_slice, found[i])
    return found


def _is_mean(replica_slice: ReplicaSlice, gradient: Any) -> bool:
    """Returns whether the mean over the replicas is the gradient of one device, or may be it."""
    note_unknown(replica_slice, gradient)
    known = are_known(replica_slice) and isinstance(gradient, tf.Tensor)
    return not known or label_of(gradient).kind in (Kind.MEAN, Kind.LOCAL)


# The module of TensorFlow, the name there, and the function that takes its place in a step.
FUNCTIONS: list[tuple[Any, str, Callable[..., Any]]] = [
    (tf.nn, "compute_average_loss", average_loss),
    (tf.nn, "scale_regularization_loss", regularization_loss),
    (tf, "clip_by_global_norm", clip_by_global_norm),
    (tf.linalg, "global_norm", global_norm),
]

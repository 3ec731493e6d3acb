"""TensorFlow's functions for custom training steps, as a replica slice needs them.

TensorFlow made these functions for loops that sum the gradients of the replicas without weights
(see TensorFlow's guide "Custom training with tf.distribute.Strategy"). In a prepared model's step
the gradient is a mean over the rows of the global batch. So the functions here scale losses to this
replica's rows, and reduce gradients over all replicas before they use them.

Each function takes TensorFlow's own function, the replica slice, and then the arguments of the
user.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmulti.distribution.custom_gradients import mark_formula
from tfmulti.distribution.global_values import are_known, note_unknown, of_one_device
from tfmulti.distribution.losses import in_passes
from tfmulti.distribution.replica_context import mark_global, reduce_gradients
from tfmulti.distribution.replica_slice import PerThread, ReplicaSlice
from tfmulti.distribution.row_labels import ALIKE, label_of, mark, mark_call
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

    TensorFlow's function also divides by the number of replicas. Without `global_batch_size` this
    one divides by the number of rows, so the result is a mean over rows. With it the result is a
    sum over rows divided by a number, as in the user's own code.
    """
    if global_batch_size is None:
        # The labels tell that a shape has the number of rows.
        read_rows = tf.shape(per_example_loss)[0]
        own_rows = tf.maximum(replica_slice.own_rows, 1)
        global_batch_size = read_rows if are_known(replica_slice) else own_rows
    return original(per_example_loss, sample_weight, global_batch_size)


def regularization_loss(
    original: Original, replica_slice: ReplicaSlice, regularization_loss: Any
) -> tf.Tensor:
    """Returns the sum of regularization losses.

    It is the same on all replicas, so it is also the mean over the replicas.
    """
    return tf.reduce_sum(regularization_loss)


# Whether this thread is inside an optimizer, where gradients are those of the global batch already.
gradients_are_global = PerThread(False)


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

    Raises:
        ModelError: the step takes several passes (microbatches).
    """
    gradients = _global(replica_slice, t_list)
    clipped, norm = original(gradients, clip_norm, *args, **kwargs)
    for value in (norm, *clipped):
        mark(value, ALIKE)
    return [mark_global(gradient) for gradient in clipped], norm


def clip(original: Original, replica_slice: ReplicaSlice, t: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns a clipped tensor, for `tf.clip_by_norm` and `tf.clip_by_value`.

    Labels tell how a tensor depends on the rows. A gradient of lookups in a table has no label, so
    that of the global batch is clipped.

    Raises:
        ModelError: the step takes several passes (microbatches).
    """
    if not isinstance(t, tf.IndexedSlices) or gradients_are_global.get():
        return original(t, *args, **kwargs)
    (gradient,) = _global(replica_slice, [t])
    return mark_global(original(gradient, *args, **kwargs))


def global_norm(
    original: Original, replica_slice: ReplicaSlice, t_list: Any, *args: Any, **kwargs: Any
) -> Any:
    """Returns the norm of the gradients of the global batch.

    Raises:
        ModelError: the step takes several passes (microbatches).
    """
    norm = original(_global(replica_slice, t_list), *args, **kwargs)
    mark(norm, ALIKE)
    return norm


def _global(replica_slice: ReplicaSlice, gradients: Any) -> list[Any]:
    """Returns the gradients of the global batch.

    A gradient from the tape is averaged over the replicas. A gradient that the step has clipped or
    normalized before is computed again from global values.
    """
    if in_passes():
        raise ModelError(
            "the train_step clips gradients by itself, or asks for their norm, which "
            "--microbatches knows only after the last pass. Give global_clipnorm= to the "
            "optimizer instead, or leave --microbatches out."
        )
    means = [i for i, gradient in enumerate(gradients) if _is_mean(replica_slice, gradient)]
    reduced = iter(reduce_gradients([gradients[i] for i in means]) if means else [])
    return [
        next(reduced) if i in means else of_one_device(replica_slice, gradient)
        for i, gradient in enumerate(gradients)
    ]


def _is_mean(replica_slice: ReplicaSlice, gradient: Any) -> bool:
    """Returns whether the mean over the replicas is the gradient of one device, or may be it."""
    note_unknown(replica_slice, gradient)
    is_known = are_known(replica_slice) and isinstance(gradient, tf.Tensor)
    return not is_known or label_of(gradient).kind in (Kind.MEAN, Kind.LOCAL)


def ctc_loss(
    original: Callable[..., Any], replica_slice: ReplicaSlice, *args: Any, **kwargs: Any
) -> Any:
    """Returns the CTC loss of each row, for `tf.nn.ctc_loss`, which `keras.ops.ctc_loss` calls.

    TensorFlow computes it in loops over the time steps, with a gradient of its own. So no operation
    shows that each value depends on the same row alone.
    """
    losses = original(*args, **kwargs)
    mark_call((args, kwargs), losses)
    return losses


def silu(
    original: Callable[..., Any], replica_slice: ReplicaSlice, *args: Any, **kwargs: Any
) -> Any:
    """Returns `tf.nn.silu`, whose custom gradient is that of its operations with less memory."""
    outputs = original(*args, **kwargs)
    mark_formula(outputs)
    return outputs


# The functions here that take gradients, and reduce them over the replicas.
OF_GRADIENTS = (clip_by_global_norm, clip, global_norm)
# The module of TensorFlow, the name there, and the function that takes its place in a step.
FUNCTIONS: list[tuple[Any, str, Callable[..., Any]]] = [
    (tf.nn, "compute_average_loss", average_loss),
    (tf.nn, "scale_regularization_loss", regularization_loss),
    (tf, "clip_by_global_norm", clip_by_global_norm),
    (tf, "clip_by_norm", clip),
    (tf, "clip_by_value", clip),
    (tf.linalg, "global_norm", global_norm),
    (tf.nn, "ctc_loss", ctc_loss),
    (tf.nn, "silu", silu),
    (tf.nn, "swish", silu),
]

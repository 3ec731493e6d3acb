"""Loss patches: the replicas' losses add up to the loss of the global batch.

`distribution.losses` has the formulas. Keras divides each replica's loss by the number of replicas,
which is wrong for replicas with different numbers of rows. Inside a prepared model's step the
patches leave that division out, and scale each loss to the replica's part of the global batch. A
loss that is computed from several rows together is made the value of the global batch:
`_loss_of_all_rows` decides how.

| what | private name | upstream | can go when |
|---|---|---|---|
| losses | `losses.loss.scale_loss_for_distribution`, `unscale_…`, `reduce_weighted_values`, `Loss.__call__` | keras#20585 | a loss tells over which rows it takes the mean |
| `add_loss` of a vector | `Trainer._aggregate_additional_loss` | keras#20585 | the same |
| what Keras puts on a tensor | `_keras_logits`, `_keras_mask` | none | a copy of a tensor can get them in public |
"""  # noqa: E501

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as loss_module
from keras.src.trainers.trainer import Trainer

from tfmulti.distribution import global_values, losses, row_labels
from tfmulti.distribution.replica_slice import PerThread, ReplicaSlice, computing, current, partial
from tfmulti.distribution.row_rules import Kind
from tfmulti.keras_patches.model_structure import is_along_rows
from tfmulti.keras_patches.patching import in_replica_slice, is_of_keras, replace

# The attributes that Keras puts on a tensor: the logits of a softmax or sigmoid, and the mask that
# tells which timesteps count.
ATTACHED = ("_keras_logits", "_keras_mask")


def install() -> None:
    """Patches Keras' losses, and the sum of the losses that `add_loss` was given."""
    for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
        replace(loss_module, name, _only_outside)
    replace(loss_module, "reduce_weighted_values", _part_of_global)
    replace(keras.losses.Loss, "__call__", in_replica_slice(_loss_of_all_rows))
    replace(Trainer, "_aggregate_additional_loss", in_replica_slice(_added_loss))


def _only_outside(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that changes a loss only outside a prepared model's step."""
    return lambda value: original(value) if current() is None else value


def _part_of_global(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `reduce_weighted_values` that scales a replica's loss to the global batch."""

    def reduce(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        loss = original(values, sample_weight, mask, reduction, dtype)
        values = tf.convert_to_tensor(values)
        one_number = values.shape.rank == 0
        losses.note_reduction(values)
        replica_slice = partial()
        # `_loss_of_all_rows` makes a loss of one number the loss of the global batch.
        if replica_slice is None or one_number:
            return loss
        if not (_is_by_rows(replica_slice, values) and weigh_rows(replica_slice, sample_weight)):
            return loss
        by_weight = reduction == "mean_with_sample_weight" and mask is None
        if by_weight and sample_weight is not None and not keras.ops.ndim(sample_weight):
            # Divided by one weight for all values, the weighted sum is the sum.
            reduction = "sum"
        same_rank = loss_module.squeeze_or_expand_to_same_rank
        part = losses.scaled_to_global(
            replica_slice,
            loss,
            reduction,
            lambda: losses.divisor_of(values, sample_weight, mask, reduction, same_rank),
        )
        # The values may be LOCAL. Then `_loss_of_all_rows` finds out whether they have rows.
        if part.shape.rank == 0 and (by_rows.get() or have_rows(values)):
            row_labels.mark(part, row_labels.MEAN)
        return part

    return reduce


def _is_by_rows(replica_slice: ReplicaSlice, values: Any) -> bool:
    """Returns whether a loss has a value for each row, or may have one."""
    kinds = (Kind.ROWS, Kind.LOCAL)
    return (
        by_rows.get()
        or not global_values.are_known(replica_slice)
        or row_labels.label_of(values).kind in kinds
    )


# Whether this thread computes a loss or metric that has a value for each row, from that row alone.
by_rows = PerThread(False)


def have_rows(*values: Any) -> bool:
    """Returns whether each value has rows, every one computed from the same input row alone.

    From such values a loss or metric of Keras computes the value of each row by itself.
    """
    leaves = tf.nest.flatten(values)
    return all(row_labels.label_of(leaf).kind is Kind.ROWS for leaf in leaves)


# These functions of Keras pair the rows of all shapes that they accept.
_PAIR_ALL_SHAPES = (
    keras.losses.ctc,
    keras.losses.sparse_categorical_crossentropy,
    keras.metrics.sparse_top_k_categorical_accuracy,
)


def computes_by_rows(part: Any, function: Any, y_true: Any, y_pred: Any) -> bool:
    """Returns whether a loss or metric of Keras computes each value from one row alone.

    If targets and predictions have other numbers of axes than a function expects, TensorFlow
    broadcasts them: targets of the shape `(rows, 4)` and predictions of the shape `(rows, 1, 4)`
    give a value for each pair of rows.

    Args:
        part: the loss or the metric.
        function: the function of targets and predictions that it calls.
        y_true: the targets, as the function gets them.
        y_pred: the predictions.
    """
    rank = y_pred.shape.rank if isinstance(y_pred, tf.Tensor) else None
    if not is_of_keras(function) or is_along_rows(part, rank):
        return False
    if function in _PAIR_ALL_SHAPES or not all(isinstance(v, tf.Tensor) for v in (y_true, y_pred)):
        return True
    if rank is None or y_true.shape.rank is None:
        return False
    fewer = rank - y_true.shape.rank
    if function is keras.losses.categorical_generalized_cross_entropy:
        return bool(fewer == 1)
    if function is keras.metrics.sparse_categorical_accuracy:
        return bool(fewer == 1 or (fewer == 0 and y_true.shape[-1] == 1))
    return bool(fewer == 0)


def weigh_rows(replica_slice: ReplicaSlice, weights: Any) -> bool:
    """Returns whether weights are right as they are for the values of this replica's rows."""
    kinds = {row_labels.label_of(leaf).kind for leaf in tf.nest.flatten(weights)}
    is_known = global_values.are_known(replica_slice)
    return weights is None or not is_known or kinds <= {Kind.ROWS, Kind.ALIKE, Kind.LOCAL}


def note_trusted(replica_slice: ReplicaSlice, *values: Any) -> None:
    """Notes values that are not understood, and are taken for values of this replica's rows."""
    tensors = [v for v in tf.nest.flatten(values) if isinstance(v, tf.Tensor)]
    for label in map(row_labels.label_of, tensors):
        if label.kind is Kind.LOCAL and global_values.are_known(replica_slice):
            replica_slice.note_trusted(label.reason)


def _loss_of_all_rows(
    original: Callable[..., Any],
    replica_slice: ReplicaSlice,
    loss: Any,
    y_true: Any,
    y_pred: Any,
    sample_weight: Any = None,
) -> Any:
    """Returns this replica's part of the global loss, for `__call__` of a loss object.

    Where `row_labels` tell how the result depends on the rows, `global_values` makes it that part.
    Otherwise the loss is first computed from arguments that are labelled as rows, to see whether it
    has a value for each row, from that row alone. Such a loss is computed as it is, and so is a
    loss of Keras that has a value for each row. Any other loss is computed from the rows of all
    replicas.
    """
    compute = functools.partial(original, loss)
    function = getattr(loss, "fn", type(loss))
    pair = (y_true, y_pred)
    if all(isinstance(value, tf.Tensor) for value in pair):
        # Keras' losses give both the same number of axes before they call their function.
        pair = loss_module.squeeze_or_expand_to_same_rank(*pair)
    # A subclass of one of Keras' losses, or a replaced method, may compute its values otherwise.
    is_keras = is_of_keras(loss.call) and computes_by_rows(loss, function, *pair)
    if global_values.are_known(replica_slice):
        are_rows = have_rows(y_true, y_pred) and weigh_rows(replica_slice, sample_weight)
        with by_rows.set_to(is_keras and are_rows):
            value = compute(y_true, y_pred, sample_weight)
        kind = row_labels.label_of(value).kind
        # The user's code reduces these values later. That result becomes global by itself.
        if kind is not Kind.LOCAL and value.shape.rank != 0:
            return value
        if kind is not Kind.LOCAL:
            return global_values.averaged(replica_slice, value)
    calls = losses.LossCalls()
    # This call only shows how the loss is computed. The step does not use its result.
    with losses.watching(calls), computing(replica_slice.alone()):
        value = compute(*map(_as_rows, (y_true, y_pred, sample_weight)))
    has_values = not calls.scalar and (calls.reduced or value.shape.rank)
    # A `__call__` of the user's own may compute something else from the reduced values.
    is_reduced_last = calls.reduced and type(loss).__call__ is keras.losses.Loss.__call__
    if has_values and (is_keras or (calls.by_rows and is_reduced_last)):
        note_trusted(replica_slice, y_true, y_pred)
        with by_rows.set_to(True):
            return compute(y_true, y_pred, sample_weight)
    return losses.from_all_rows(replica_slice, compute, y_true, y_pred, sample_weight, ATTACHED)


def _as_rows(values: Any) -> Any:
    """Returns a nest of the same tensors, labelled as rows of the batch."""

    def labelled(value: Any) -> Any:
        if not isinstance(value, tf.Tensor) or not value.shape.rank:
            return value
        rows = tf.identity(value)
        row_labels.mark(rows, row_labels.rows((1,)))
        for name in ATTACHED:
            if hasattr(value, name):
                setattr(rows, name, labelled(getattr(value, name)))
        return rows

    return tf.nest.map_structure(labelled, values)


def _added_loss(
    original: Callable[..., Any], replica_slice: ReplicaSlice, trainer: Any, loss: Any
) -> Any:
    """Returns Keras' sum of a loss from `add_loss`, as this replica's part of the global sum."""
    if not global_values.are_known(replica_slice):
        loss = losses.added_loss(replica_slice, loss)
    return original(trainer, loss)


def watch_losses(model: keras.Model) -> None:
    """Patches `__call__` of the user's own loss classes in a model, as that of Keras' `Loss`."""
    for loss in keras.tree.flatten(model.loss):
        if isinstance(loss, keras.losses.Loss):
            owner = next(cls for cls in type(loss).__mro__ if "__call__" in vars(cls))
            replace(owner, "__call__", in_replica_slice(_loss_of_all_rows))

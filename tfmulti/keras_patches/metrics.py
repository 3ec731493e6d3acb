"""Metric patches: the replicas' metric states must sum to the state of one device.

Each replica updates its own state by its own rows, and the states are added up later. A value for
each row fits that rule as it is. A single number for a batch does not: it is replaced by a value
of the global batch and counted once. Where `row_labels` do not tell how the values of a metric's
function depend on the rows, the function gets the rows of all replicas, and replica 0 alone counts
the result.

Keras' other metrics, such as AUC, add up values that they compute from rows. They get the rows as on
one device. Where a step gives them anything but rows, each replica's new state is computed as that
of a metric of the user's own.

| what | private name | upstream | can go when |
|---|---|---|---|
| metrics of one number per batch | `MeanMetricWrapper._fn`, `_fn_kwargs`, `_keras_mask` of a tensor, and `Mean.update_state` | none | a metric can be told what it is computed from |
"""  # noqa: E501

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as loss_module

from tfmulti.distribution import global_values, losses, row_labels
from tfmulti.distribution.replica_slice import PerThread, ReplicaSlice, computing
from tfmulti.distribution.row_rules import Kind
from tfmulti.keras_patches.losses import (
    ATTACHED,
    by_rows,
    computes_by_rows,
    have_rows,
    note_trusted,
    weigh_rows,
)
from tfmulti.keras_patches.patching import in_replica_slice, replace


def install() -> None:
    """Patches `update_state` of Keras' metrics."""
    exported = [getattr(keras.metrics, name) for name in dir(keras.metrics)]
    # Some metrics have their `update_state` from a class that Keras does not export.
    classes = {base for each in exported if isinstance(each, type) for base in each.mro()}
    for metric in classes - {keras.metrics.Metric}:
        # Those of one value are made of Mean or Sum, which have a patch of their own.
        is_of_one = issubclass(metric, (keras.metrics.Mean, keras.metrics.Sum))
        if not is_of_one and "update_state" in vars(metric):
            replace(metric, "update_state", _with_labels(_metric_of_rows))
    replace(keras.metrics.MeanMetricWrapper, "update_state", _with_labels(_metric_of_all_rows))
    for metric in (keras.metrics.Mean, keras.metrics.Sum):
        replace(metric, "update_state", _with_labels(_part_of_mean))


# Whether this thread updates a metric of Keras by values of this replica's rows alone, or by its
# part of other values. The metric then adds that to this replica's part of the state.
_adds_parts = PerThread(False)


def _with_labels(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Returns `in_replica_slice` of a function that knows the labels inside conditions, too."""

    def labelled(*args: Any, **kwargs: Any) -> Any:
        with row_labels.kept_in_branch():
            return function(*args, **kwargs)

    return in_replica_slice(labelled)


def _metric_of_rows(
    original: Callable[..., Any], replica_slice: ReplicaSlice, *args: Any, **kwargs: Any
) -> Any:
    """Calls the `update_state` of a Keras metric that adds up a value for each row.

    The metric keeps its own code. It gets the rows of one device, if they depend on other rows.
    """
    metric, *values = args
    rows = functools.partial(global_values.rows_of_one_device, replica_slice)
    values, kwargs = tf.nest.map_structure(rows, (values, kwargs))
    given = [value for value in tf.nest.flatten((values, kwargs)) if value is not None]
    note_trusted(replica_slice, *given)
    kinds = {row_labels.label_of(value).kind for value in given}
    have_rows = not global_values.are_known(replica_slice) or kinds <= {Kind.ROWS, Kind.LOCAL}
    with _adds_parts.set_to(_adds_parts.get() or have_rows):
        return original(metric, *values, **kwargs)


def part_of_state(replica_slice: ReplicaSlice, variable: Any, value: Any) -> Any:
    """Returns what a replica assigns to a variable of a metric, as its part of the whole state.

    A replica without rows computes one row that does not count. Its part must stay as it was, but
    for a value that does not depend on that row, such as the zeros of `reset_state`.

    Args:
        replica_slice: the replica's slice.
        variable: the metric's Keras variable.
        value: the value that the metric's code assigns.
    """
    kind = row_labels.label_of(value).kind
    adds_parts = _adds_parts.get()
    if not adds_parts:
        value = global_values.part_of_sum(replica_slice, value)
    if adds_parts or kind in (Kind.ROWS, Kind.MIXED, Kind.LOCAL):
        has_rows = replica_slice.own_rows > 0
        return tf.where(has_rows, tf.cast(value, variable.dtype), variable.value)
    return value


def _metric_of_all_rows(
    original: Callable[..., Any],
    replica_slice: ReplicaSlice,
    metric: Any,
    y_true: Any,
    y_pred: Any,
    sample_weight: Any = None,
) -> Any:
    """Updates a metric that keeps the mean of a function's values, for `update_state`."""
    # Where the function returns rows and is the user's own, it is called again below, since it may
    # draw other numbers here.
    with computing(replica_slice.alone()):
        values = tf.convert_to_tensor(metric._fn(y_true, y_pred, **metric._fn_kwargs))
    one_number = values.shape.rank == 0
    has_labels = global_values.are_known(replica_slice)
    kind = row_labels.label_of(values).kind if has_labels else Kind.LOCAL
    unknown = kind is Kind.LOCAL
    is_keras = computes_by_rows(metric, metric._fn, y_true, y_pred)
    trusted = is_keras and (unknown or have_rows(y_true, y_pred))

    def update_by_values() -> Any:
        mask = getattr(y_pred, "_keras_mask", None)
        weights = loss_module.apply_mask(sample_weight, mask, metric.dtype, "sum")
        return keras.metrics.Mean.update_state(metric, values, weights)

    if kind is Kind.ROWS or (trusted and not one_number):
        note_trusted(replica_slice, y_true, y_pred)
        with by_rows.set_to(True):
            if is_keras:
                return update_by_values()
            return original(metric, y_true, y_pred, sample_weight)
    if not unknown:
        return update_by_values()
    # Every replica computes the number of the whole batch, and the replicas' states are summed
    # later. So only replica 0 may count it.
    context = tf.distribute.get_replica_context()
    counts = tf.cast(context.replica_id_in_sync_group == 0, metric.dtype)

    def update(y_true: Any, y_pred: Any, weights: Any) -> Any:
        if weights is None:
            weights = tf.ones([] if one_number else tf.shape(y_pred)[:1], counts.dtype)
        original(metric, y_true, y_pred, counts * tf.cast(weights, counts.dtype))
        return tf.zeros([])

    return losses.from_all_rows(replica_slice, update, y_true, y_pred, sample_weight, ATTACHED)


def _part_of_mean(
    original: Callable[..., Any],
    replica_slice: ReplicaSlice,
    metric: Any,
    values: Any,
    sample_weight: Any = None,
) -> Any:
    """Updates a metric that keeps a sum of values or their mean, for `update_state`."""
    values, sample_weight = _counted_once(replica_slice, values, sample_weight)
    with _adds_parts.set_to(True):
        return original(metric, values, sample_weight)


def _counted_once(replica_slice: ReplicaSlice, values: Any, weight: Any) -> tuple[Any, Any]:
    """Returns the values and weights by which this replica's state becomes its part of the sum.

    A value for each row stays. A value of the whole batch, such as its loss, is made the value of
    the global batch. Its weight is divided among the replicas, so that it counts once.
    """
    tensor = tf.convert_to_tensor(values)
    if by_rows.get() and tensor.shape.rank != 0:
        return values, _weight_of_rows(replica_slice, weight)
    if not global_values.are_known(replica_slice):
        return values, replica_slice.weight if tensor.shape.rank == 0 and weight is None else weight
    kind = row_labels.label_of(tensor).kind
    global_values.note_unknown(replica_slice, tensor)
    if kind is Kind.ROWS or (kind is Kind.LOCAL and tensor.shape.rank != 0):
        return values, _weight_of_rows(replica_slice, weight)
    weight_kind = Kind.ALIKE if weight is None else row_labels.label_of(weight).kind
    # The weight's dependence on the rows may be unknown, as for the rows of a ragged tensor.
    if weight_kind is Kind.LOCAL:
        global_values.note_unknown(replica_slice, weight)
    # A weight that is not understood is taken for a number of this replica's rows.
    if weight_kind is Kind.LOCAL:
        return global_values.averaged(replica_slice, tensor), weight
    if weight_kind in (Kind.ALIKE, Kind.COUNT):
        average = global_values.averaged(replica_slice, tensor)
        if weight is not None:
            return average, _part_of_weight(replica_slice, weight)
        # Without weights each value of a vector counts by itself, so each gets the part as its
        # weight. With one weight for all of them, Keras would count their mean once.
        return average, tf.fill(
            tf.shape(average)[:1], replica_slice.weight
        ) if average.shape.rank else replica_slice.weight
    if weight_kind is Kind.SUM:
        part = global_values.part_of_sum(replica_slice, weight)
        return global_values.of_one_device(replica_slice, tensor), part
    own_part = _part_of_weight(replica_slice, weight)
    return global_values.of_one_device(replica_slice, tensor), own_part


def _part_of_weight(replica_slice: ReplicaSlice, weight: Any) -> tf.Tensor:
    """Returns this replica's part, by its rows, of the weight of a batch on one device."""
    weight = global_values.of_one_device(replica_slice, weight)
    return replica_slice.weight * tf.cast(weight, replica_slice.weight.dtype)


def _weight_of_rows(replica_slice: ReplicaSlice, weight: Any) -> Any:
    """Returns the weights of this replica's rows, or the one weight of all rows, of one device."""
    if weight is None or row_labels.label_of(weight).kind is Kind.LOCAL:
        return weight
    # Keras takes the mean of the values, and counts it by such a weight.
    if tf.convert_to_tensor(weight).shape.rank == 0:
        return _part_of_weight(replica_slice, weight)
    if weigh_rows(replica_slice, weight):
        return weight
    return global_values.read_rows(replica_slice, weight)

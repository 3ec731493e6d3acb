"""Metrics whose states, summed over the replicas, are those of one device.

| what | private name | upstream | can go when |
|---|---|---|---|
| metrics of one number a batch | `MeanMetricWrapper._fn`, and `Mean.update_state` | none | a metric can be told what it is computed from |
"""  # noqa: E501

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as loss_module

from tfmulti.distribution import (
    global_values,
    losses,
    row_labels,
)
from tfmulti.distribution.replica_slice import (
    ReplicaSlice,
    computing,
    partial,
)
from tfmulti.distribution.row_rules import Kind
from tfmulti.keras_patches.losses import ATTACHED, have_rows, of_keras_by_rows
from tfmulti.keras_patches.patching import is_of_keras, replace


def install() -> None:
    replace(keras.metrics.MeanMetricWrapper, "update_state", _metric_of_all_rows)
    for metric in (keras.metrics.Mean, keras.metrics.Sum):
        replace(metric, "update_state", _mean_of_shares)


def _metric_of_all_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_state(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        share = partial()
        if share is None:
            return original(self, y_true, y_pred, sample_weight)
        values = functools.partial(self._fn, **self._fn_kwargs)
        with computing(share.alone()):
            found = tf.convert_to_tensor(values(y_true, y_pred))
        one_number = found.shape.rank == 0
        known = global_values.are_known(share)
        kind = row_labels.label_of(found).kind if known else Kind.LOCAL
        unknown = kind is Kind.LOCAL
        trusted = is_of_keras(self._fn) and (unknown or have_rows(y_true, y_pred))
        if kind is Kind.ROWS or (trusted and not one_number):
            with of_keras_by_rows.set_to(True):
                return original(self, y_true, y_pred, sample_weight)
        if not unknown:
            mask = getattr(y_pred, "_keras_mask", None)
            weights = loss_module.apply_mask(sample_weight, mask, self.dtype, "sum")
            return keras.metrics.Mean.update_state(self, found, weights)
        if share.is_local and not losses.in_passes():
            return original(self, y_true, y_pred, sample_weight)
        # The numbers are of the whole batch; the replicas' states are summed later.
        context = tf.distribute.get_replica_context()
        counts = tf.cast(context.replica_id_in_sync_group == 0, tf.float32)

        def update(y_true: Any, y_pred: Any, weights: Any) -> Any:
            if weights is None:
                weights = tf.ones([] if one_number else tf.shape(y_pred)[:1])
            original(self, y_true, y_pred, counts * tf.cast(weights, tf.float32))
            return tf.zeros([])

        return losses.from_all_rows(share, update, y_true, y_pred, sample_weight, ATTACHED)

    return update_state


def _mean_of_shares(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `update_state` of a metric that adds values up, or their mean by weights."""

    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        share = partial()
        if share is not None:
            values, sample_weight = _counted_once(share, values, sample_weight)
        return original(self, values, sample_weight)

    return update_state


def _counted_once(share: ReplicaSlice, values: Any, weight: Any) -> tuple[Any, Any]:
    """Returns what a metric gets on this replica, so that the replicas' states add up.

    What is no value of rows, such as a batch's loss, counts once, whoever computed it.
    """
    tensor = tf.convert_to_tensor(values)
    if of_keras_by_rows.get() and tensor.shape.rank != 0:
        return values, weight
    if not global_values.are_known(share):
        return values, share.part if tensor.shape.rank == 0 and weight is None else weight
    kind = row_labels.label_of(tensor).kind
    if kind is Kind.LOCAL:
        share.note_unknown(row_labels.label_of(tensor).reason)
    if kind is Kind.ROWS or (kind is Kind.LOCAL and tensor.shape.rank != 0):
        return values, weight
    weighs = Kind.ALIKE if weight is None else row_labels.label_of(weight).kind
    if weighs is Kind.LOCAL:  # such as the rows of a ragged tensor
        global_values.note_unknown(share, weight)
    if weighs in (Kind.COUNT, Kind.LOCAL):  # of its rows: the replicas' mean by rows is meant
        return global_values.averaged(share, tensor), weight
    if weighs is Kind.ALIKE:
        found = global_values.averaged(share, tensor)
        if weight is not None:
            return found, share.part * tf.cast(weight, share.part.dtype)
        # Without weights each value of a vector counts by itself, with one for all their mean.
        return found, tf.fill(tf.shape(found)[:1], share.part) if found.shape.rank else share.part
    if weighs is Kind.SUM:  # a part of the whole weight
        return global_values.of_one_device(share, tensor), weight
    whole = global_values.of_one_device(share, weight)
    part = tf.cast(whole, share.part.dtype) * share.part
    return global_values.of_one_device(share, tensor), part

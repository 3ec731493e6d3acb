"""Replaces what one replica computes from its own rows by the values of the global batch.

The user's own `train_step` is written for one device. It may sum, average and compare rows. Each
replica traces it for its own rows. Where a gradient, a log, a metric or a variable uses a value of
the step, that value is replaced by the one of the global batch, which `global_builder` builds.
`global_gradients` gives the gradients.

With the weight `w_r` of replica `r`, its part of the global batch's rows, a value `V` of one device
has three forms:

- `averaged`: `a_r` with `sum of w_r * a_r = V`. A replica's part `s_r` of a sum becomes `s_r /
  w_r`.
- `part_of_sum`: `p_r` with `sum of p_r = V`.
- `of_one_device`: `V` itself on every replica.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfmulti.distribution import row_labels
from tfmulti.distribution.global_builder import IsLost, builder_of, own_part
from tfmulti.distribution.replica_context import is_known_gradient
from tfmulti.distribution.replica_slice import ReplicaSlice
from tfmulti.distribution.row_labels import is_of_several_rows, label_of
from tfmulti.distribution.row_rules import Kind


def are_known(replica_slice: ReplicaSlice) -> bool:
    """Returns whether values of the global batch can be built in this graph."""
    return row_labels.are_kept() and not replica_slice.is_whole


def averaged(replica_slice: ReplicaSlice, value: Any) -> Any:
    """Returns a value whose mean over the replicas, weighted by rows, is the value of one device.

    A value that is not understood stays as it is, and is noted (`note_unknown`).

    Raises:
        ModelError: the value needs all rows together, and the step takes several passes.
    """
    if not are_known(replica_slice) or not isinstance(value, (tf.Tensor, tf.IndexedSlices)):
        return value
    kind = label_of(value).kind
    note_unknown(replica_slice, value)
    if kind in (Kind.ALIKE, Kind.MEAN, Kind.LOCAL):
        return value
    with builder_of(replica_slice, value) as builder:
        average = builder.average(value) if kind in (Kind.SUM, Kind.COUNT) else builder.whole(value)
        average = builder.on_tape(average)
    row_labels.mark(average, row_labels.MEAN)
    return average


def of_one_device(replica_slice: ReplicaSlice, value: Any) -> Any:
    """Returns the value of one device, the same on every replica.

    A value that is not understood stays as it is, and is noted (`note_unknown`).

    Raises:
        ModelError: the value needs all rows together, and the step takes several passes.
    """
    if not are_known(replica_slice) or not isinstance(value, tf.Tensor):
        return value
    note_unknown(replica_slice, value)
    if label_of(value).kind in (Kind.ALIKE, Kind.LOCAL):
        return value
    with builder_of(replica_slice, value) as builder:
        global_value = builder.on_tape(builder.whole(value))
    row_labels.mark(global_value, row_labels.ALIKE)
    return global_value


def input_of_one_device(replica_slice: ReplicaSlice, value: Any) -> Any:
    """Returns what `of_one_device` does, for a product that no replica can compute by itself.

    Such is a product of a matrix with a known number of columns and of all rows, as in a graph
    convolution. Each replica uses the value with its own rows. Other values stay as they are.
    """
    if not are_known(replica_slice) or not row_labels.is_product_of_all_rows(value):
        return value
    with builder_of(replica_slice, value) as builder:
        global_value = builder.factor_on_tape(builder.whole(value))
    row_labels.mark(global_value, row_labels.ALIKE)
    return global_value


def rows_of_one_device(
    replica_slice: ReplicaSlice,
    value: Any,
    *,
    is_lost: IsLost = lambda *_: False,
) -> Any:
    """Returns this replica's rows as one device computes them, and labels them as rows.

    A value stays as it is if it has no rows, or if its rows do not depend on other rows.

    Args:
        replica_slice: this replica's slice.
        value: a tensor, or anything else.
        is_lost: gets the value and the rows that were made of it before. It returns whether a tape
            records now that has recorded the value, but not these rows. Then they are made anew.

    Raises:
        ModelError: the value needs all rows together, and the step takes several passes.
    """
    if not are_known(replica_slice) or label_of(value).kind is not Kind.MIXED:
        return value
    with builder_of(replica_slice, value) as builder:
        return builder.watched(value, is_lost)


def part_of_sum(replica_slice: ReplicaSlice, value: Any) -> Any:
    """Returns a value whose sum over the replicas is the value of one device.

    A value for each row stays as it is. So does a value that is not understood, which is noted.

    Raises:
        ModelError: the value needs all rows together, and the step takes several passes.
    """
    if not are_known(replica_slice) or not isinstance(value, tf.Tensor):
        return value
    if label_of(value).kind in (Kind.ROWS, Kind.MIXED, Kind.LOCAL):
        note_unknown(replica_slice, value)
        return value
    with builder_of(replica_slice, value) as builder:
        return builder.part(value)


def own_rows(replica_slice: ReplicaSlice, value: Any) -> Any:
    """Returns this replica's part of the rows that one device computes, in their order.

    Where the value has not one part for each row, such as a selection of rows, the first replica
    has all of it.

    Raises:
        ModelError: the value needs all rows together, and the step takes several passes.
    """
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        return value[: replica_slice.own_rows]
    value = tf.convert_to_tensor(value)
    label = label_of(value)
    by_rows = len(label.parts) == 1 or label.kind is Kind.LOCAL
    if are_known(replica_slice) and not by_rows:
        with builder_of(replica_slice, value) as builder:
            value = builder.whole(value)
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        return value[: tf.where(number == 0, tf.shape(value)[0], 0)]
    value = read_rows(replica_slice, value)
    # A row may have several entries along axis 0.
    entries = tf.shape(value, tf.int64)[0] // tf.maximum(replica_slice.own_rows, 1)
    return value[: entries * replica_slice.own_rows]


def read_rows(replica_slice: ReplicaSlice, value: tf.Tensor) -> tf.Tensor:
    """Returns the rows of a value that one device computes for the rows that this replica reads.

    Raises:
        ModelError: the value needs all rows together, and the step takes several passes.
    """
    if not are_known(replica_slice):
        return value
    note_unknown(replica_slice, value)
    with builder_of(replica_slice, value) as builder:
        if label_of(value).kind is not Kind.GLOBAL:
            return builder.rows(value)
        return own_part(replica_slice, builder.whole(value))


def note_unknown(replica_slice: ReplicaSlice, value: Any) -> None:
    """Notes the reason if it is not known how a value depends on the rows.

    The first step is then compared with one device, or each replica computes the whole batch.
    """
    label = label_of(value)
    if label.kind is Kind.LOCAL and not is_known_gradient(value):
        replica_slice.note_unknown(label.reason)


def depends_on_several_rows(replica_slice: ReplicaSlice, value: Any) -> bool:
    """Returns whether it is known that a tensor depends on several rows of the batch together."""
    return are_known(replica_slice) and is_of_several_rows(value)


def watched_by_tape(replica_slice: ReplicaSlice, value: tf.Tensor) -> tf.Tensor:
    """Returns the value of one device by which a tape differentiates in place of a watched tensor.

    The watched tensor must depend on several rows of the batch (`depends_on_several_rows`).
    If it has rows, the new tensor has those of this replica. From now on `global_gradients` takes
    the new tensor as the source.

    Raises:
        ModelError: the value needs all rows together, and the step takes several passes.
    """
    with builder_of(replica_slice, value) as builder:
        return builder.watched(value)

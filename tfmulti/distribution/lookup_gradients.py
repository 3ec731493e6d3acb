"""Gradients of tables in which a step looks up entries, such as the table of an embedding.

Such a gradient is a `tf.IndexedSlices`: a gradient for each lookup, and the index of its entry. An
optimizer of Keras handles these gradients one by one: Adam squares each of them. So the
IndexedSlices of the global batch must have one gradient for each lookup of one device.

- The tokens of a batch are different on each replica. Their gradients are concatenated.
- Indices such as positions are the same on all replicas. They count as one lookup, and
  their gradients are summed.
- A product with a sparse tensor looks up each entry once, and so does code that calls `tf.unique`.
  The gradients of an entry that several replicas look up are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmulti.distribution.row_labels import label_of
from tfmulti.distribution.row_rules import Kind


class Lookup(NamedTuple):
    """The gradient of one lookup.

    Attributes:
        values: the gradients of the entries.
        indices: the indices of the entries.
        is_alike: whether all replicas look up the same indices.
        is_distinct: whether each index is looked up once, because `tf.unique` has made them.
    """

    values: tf.Tensor
    indices: tf.Tensor
    is_alike: bool
    is_distinct: bool = False


# `joined_lookups` gives indices this attribute: whether they are alike, and whether distinct.
_KIND = "tfmulti_kind_of_lookup"
# Operations that do not change which indices there are.
_SAME_INDICES = ("Reshape", "Identity", "Cast")


def lookups_in(gradient: tf.IndexedSlices) -> list[Lookup]:
    """Returns the lookups whose gradients TensorFlow has concatenated into one IndexedSlices."""
    indices, values = gradient.indices, gradient.values
    # An eager tensor does not know the operations that computed it.
    if not hasattr(indices, "graph"):
        return [Lookup(values, indices, False)]
    if hasattr(indices, _KIND):
        return [Lookup(values, indices, *getattr(indices, _KIND))]
    if label_of(indices).kind is Kind.ALIKE:
        return [Lookup(values, indices, True)]
    if _are_distinct(indices):
        return [Lookup(values, indices, False, is_distinct=True)]
    if indices.op.type != "ConcatV2":
        return [Lookup(values, indices, False)]
    all_indices = list(indices.op.inputs)[:-1]
    all_values = tf.split(values, [tf.shape(part)[0] for part in all_indices])
    return [
        lookup
        for its_indices, its_values in zip(all_indices, all_values, strict=True)
        for lookup in lookups_in(tf.IndexedSlices(its_values, its_indices, gradient.dense_shape))
    ]


def _are_distinct(indices: tf.Tensor) -> bool:
    """Returns whether `tf.unique` has made the indices."""
    while indices.op.type in _SAME_INDICES:
        indices = indices.op.inputs[0]
    # Its second output has the place of each index among the distinct ones.
    return indices.op.type in ("Unique", "UniqueV2") and indices.value_index == 0


def summed_over_replicas(lookup: Lookup, total: Any) -> Lookup:
    """Returns a lookup of all replicas.

    Args:
        lookup: the lookup of this replica.
        total: the sum of its values over the replicas, if all look up the same indices. Otherwise
            an IndexedSlices that joins the values and the indices of all replicas.
    """
    if lookup.is_alike:
        return Lookup(total, lookup.indices, True)
    if lookup.is_distinct:
        return _distinct(total.values, total.indices)
    return Lookup(total.values, total.indices, False)


def _distinct(values: tf.Tensor, indices: tf.Tensor) -> Lookup:
    """Returns a lookup that has each index once, with the sum of its values."""
    distinct, positions = tf.unique(indices)
    sums = tf.math.unsorted_segment_sum(values, positions, tf.size(distinct))
    return Lookup(sums, distinct, False, is_distinct=True)


def joined_lookups(lookups: Sequence[Lookup], like: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the gradients of several lookups as one IndexedSlices.

    `lookups_in` finds the same lookups in it.

    Args:
        lookups: the lookups, at least one.
        like: an IndexedSlices of the same table.
    """
    for lookup in lookups:
        if hasattr(lookup.indices, "graph"):
            # The lookups may come from a function, whose operations this graph does not have.
            setattr(lookup.indices, _KIND, (lookup.is_alike, lookup.is_distinct))
    if len(lookups) == 1:
        return tf.IndexedSlices(lookups[0].values, lookups[0].indices, like.dense_shape)
    values = tf.concat([lookup.values for lookup in lookups], 0)
    indices = tf.concat([lookup.indices for lookup in lookups], 0)
    return tf.IndexedSlices(values, indices, like.dense_shape)


def added(first: tf.IndexedSlices, second: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the sum of the gradients of two passes, which have made the same lookups.

    Gradients of the same indices are added, and others are concatenated. `lookups_in` finds in the
    sum as many lookups as in the gradient of one pass.
    """
    lookups: list[Lookup] = []
    for one, other in zip(lookups_in(first), lookups_in(second), strict=True):
        if one.is_alike and other.is_alike:
            lookups.append(Lookup(one.values + other.values, one.indices, True))
        else:
            values, indices = (
                tf.concat(parts, 0) for parts in zip(one[:2], other[:2], strict=True)
            )
            are_distinct = one.is_distinct and other.is_distinct
            lookup = _distinct(values, indices) if are_distinct else Lookup(values, indices, False)
            lookups.append(lookup)
    return joined_lookups(lookups, first)

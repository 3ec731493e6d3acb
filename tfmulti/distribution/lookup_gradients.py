"""Gradients of tables in which a step looks up entries, such as the table of an embedding.

Such a gradient is a `tf.IndexedSlices`: a gradient for each lookup, and the index of its entry. An
optimizer of Keras handles these gradients one by one: Adam squares each of them. So the
IndexedSlices of the global batch must have one gradient for each lookup of one device.

- The tokens of a batch are different on each replica. Their gradients are concatenated.
- Indices such as positions are the same on all replicas. They count as one lookup, and
  their gradients are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfmulti.distribution.row_labels import label_of
from tfmulti.distribution.row_rules import Kind


class Lookup(NamedTuple):
    """The gradient of one lookup.

    Attributes:
        values: the gradients of the entries.
        indices: the indices of the entries.
        is_alike: whether all replicas look up the same indices.
    """

    values: tf.Tensor
    indices: tf.Tensor
    is_alike: bool


# `joined_lookups` sets this attribute of indices that are the same on all replicas.
_IS_ALIKE = "tfmulti_is_alike"


def lookups_in(gradient: tf.IndexedSlices) -> list[Lookup]:
    """Returns the lookups whose gradients TensorFlow has concatenated into one IndexedSlices."""
    indices, values = gradient.indices, gradient.values
    # An eager tensor does not know the operations that computed it.
    if not hasattr(indices, "graph"):
        return [Lookup(values, indices, False)]
    if hasattr(indices, _IS_ALIKE) or label_of(indices).kind is Kind.ALIKE:
        return [Lookup(values, indices, True)]
    if indices.op.type != "ConcatV2":
        return [Lookup(values, indices, False)]
    all_indices = list(indices.op.inputs)[:-1]
    all_values = tf.split(values, [tf.shape(part)[0] for part in all_indices])
    return [
        lookup
        for its_indices, its_values in zip(all_indices, all_values, strict=True)
        for lookup in lookups_in(tf.IndexedSlices(its_values, its_indices, gradient.dense_shape))
    ]


def joined_lookups(lookups: Sequence[Lookup], like: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the gradients of several lookups as one IndexedSlices.

    `lookups_in` finds the same lookups in it.

    Args:
        lookups: the lookups, at least one.
        like: an IndexedSlices of the same table.
    """
    for lookup in lookups:
        if lookup.is_alike and hasattr(lookup.indices, "graph"):
            # The lookups may come from a function, whose labels this graph does not have.
            setattr(lookup.indices, _IS_ALIKE, True)
    if len(lookups) == 1:
        return tf.IndexedSlices(lookups[0].values, lookups[0].indices, like.dense_shape)
    values = tf.concat([lookup.values for lookup in lookups], 0)
    indices = tf.concat([lookup.indices for lookup in lookups], 0)
    return tf.IndexedSlices(values, indices, like.dense_shape)


def added(first: tf.IndexedSlices, second: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the sum of the gradients of two passes, which have made the same lookups.

    Gradients with the same indices are added, and others are concatenated.
    """
    lookups: list[Lookup] = []
    for one, other in zip(lookups_in(first), lookups_in(second), strict=True):
        if one.is_alike and other.is_alike:
            lookups.append(Lookup(one.values + other.values, one.indices, True))
        else:
            lookups += [one, other]
    return joined_lookups(lookups, first)

"""Gradients of tables in which a step looks entries up, such as an embedding's table.

Such a gradient is a `tf.IndexedSlices`: a gradient for each lookup, and the index of its entry. An
optimizer of Keras handles each of these gradients by itself: Adam squares them one by one. So the
global batch's IndexedSlices must have one gradient for each lookup that one device would make.

- The tokens of a batch are different on each replica. Their gradients are concatenated.
- Indices such as positions are the same on all replicas. All replicas then make one lookup
  together, and their gradients are summed.
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


def lookups_in(gradient: tf.IndexedSlices) -> list[Lookup]:
    """Returns the lookups whose gradients TensorFlow has concatenated to one IndexedSlices."""
    indices, values = gradient.indices, gradient.values
    # An eager tensor does not tell which operations it was made by.
    if not hasattr(indices, "graph"):
        return [Lookup(values, indices, False)]
    if label_of(indices).kind is Kind.ALIKE:
        return [Lookup(values, indices, True)]
    if indices.op.type != "ConcatV2":
        return [Lookup(values, indices, False)]
    parts = list(indices.op.inputs)[:-1]
    pieces = tf.split(values, [tf.shape(part)[0] for part in parts])
    return [
        lookup
        for part, piece in zip(parts, pieces, strict=True)
        for lookup in lookups_in(tf.IndexedSlices(piece, part, gradient.dense_shape))
    ]


def joined_lookups(lookups: Sequence[Lookup], like: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the gradients of several lookups as one IndexedSlices.

    Args:
        lookups: the lookups, at least one.
        like: an IndexedSlices of the same table.
    """
    if len(lookups) == 1:
        return tf.IndexedSlices(lookups[0].values, lookups[0].indices, like.dense_shape)
    values = tf.concat([lookup.values for lookup in lookups], 0)
    indices = tf.concat([lookup.indices for lookup in lookups], 0)
    return tf.IndexedSlices(values, indices, like.dense_shape)


def added(first: tf.IndexedSlices, second: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the gradient of two passes over parts of a batch, which made the same lookups.

    Gradients by the same indices are added, and others are concatenated.
    """
    found = [
        [Lookup(one.values + other.values, one.indices, True)]
        if one.is_alike and other.is_alike
        else [one, other]
        for one, other in zip(lookups_in(first), lookups_in(second), strict=True)
    ]
    return joined_lookups([lookup for lookups in found for lookup in lookups], first)

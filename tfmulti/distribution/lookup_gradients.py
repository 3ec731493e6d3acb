"""Gradients of tables that a step looks entries up in, such as an embedding's.

Such a gradient is a `tf.IndexedSlices`: a gradient for each lookup, and its index. An optimizer of
Keras takes each entry by itself (Adam squares them, entry by entry), so an entry must stand for a
lookup of one device. Lookups of a batch's own tokens are different ones on each replica: their
entries are joined. A lookup by indices that are the same on all replicas, such as positions, is
one lookup, and its entries are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfmulti.distribution.row_labels import label_of
from tfmulti.distribution.row_rules import Kind


class Lookup(NamedTuple):
    """The gradient of one lookup, and whether all replicas have it by the same indices."""

    values: tf.Tensor
    indices: tf.Tensor
    is_alike: bool


def lookups_in(gradient: tf.IndexedSlices) -> list[Lookup]:
    """Returns the lookups whose gradients were joined to one."""
    indices, values = gradient.indices, gradient.values
    if not hasattr(indices, "graph"):  # of an eager tensor it is not known where it comes from
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
    """Returns the gradient of several lookups."""
    if len(lookups) == 1:
        return tf.IndexedSlices(lookups[0].values, lookups[0].indices, like.dense_shape)
    values = tf.concat([lookup.values for lookup in lookups], 0)
    indices = tf.concat([lookup.indices for lookup in lookups], 0)
    return tf.IndexedSlices(values, indices, like.dense_shape)


def added(first: tf.IndexedSlices, second: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the gradient of two passes over parts of a batch, which took the same lookups."""
    found = [
        [Lookup(one.values + other.values, one.indices, True)]
        if one.is_alike and other.is_alike
        else [one, other]
        for one, other in zip(lookups_in(first), lookups_in(second), strict=True)
    ]
    return joined_lookups([lookup for lookups in found for lookup in lookups], first)

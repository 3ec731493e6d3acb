"""Gives a replica its gradients of what one device would have computed.

Gradients follow the form `averaged` of `global_values`, as in `replica_context`: a value on replica
`r` is its part of a mean over the replicas, so its gradient counts with the replica's weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfmulti.distribution import custom_gradients, global_values, losses, row_labels
from tfmulti.distribution.global_builder import Builder, asked_tape
from tfmulti.distribution.replica_context import mark_of_tape
from tfmulti.distribution.replica_slice import ReplicaSlice
from tfmulti.distribution.row_labels import is_of_several_rows, label_of
from tfmulti.distribution.row_rules import Kind
from tfmulti.distribution.tape_records import TapeRecord
from tfmulti.errors import ModelError

Gradient = Callable[..., Any]
_BY_SEVERAL_ROWS = "a gradient by a tensor that is computed from several rows"


def gradient(
    replica_slice: ReplicaSlice,
    original: Gradient,
    target: Any,
    sources: Any,
    *,
    tape: TapeRecord | None = None,
    is_recorded: bool = False,
    **options: Any,
) -> Any:
    """Returns this replica's gradients of what one device would have computed.

    Gradients by variables count with this replica's weight, as all gradients do. Gradients by rows
    are those of one device for these rows.

    Args:
        replica_slice: this replica's slice.
        original: `GradientTape.gradient` of the tape.
        target: the tensor or tensors to differentiate. A tensor of several values stands for their
            sum.
        sources: variables or tensors.
        tape: what the tape has recorded; None if that is unknown.
        is_recorded: whether a tape records the gradient, and may differentiate it once more.
        **options: further arguments of `GradientTape.gradient`.

    Raises:
        ModelError: the target needs all rows together, and the step takes several passes.
    """

    def compute(*args: Any, **given: Any) -> Any:
        with losses.is_recorded.set_to(is_recorded), asked_tape.set_to(tape):
            return original(*args, **given)

    targets = [t for t in tf.nest.flatten(target) if isinstance(t, tf.Tensor)]
    with row_labels.kept_in_branch() as is_branch:
        if is_branch:
            return _gradient_in_branch(replica_slice, compute, target, sources, **options)
    if not global_values.are_known(replica_slice):
        return compute(target, sources, **options)
    builder = Builder(replica_slice, tf.compat.v1.get_default_graph())
    sources = builder.watched_instead(sources)
    kinds = {label_of(t).kind for t in targets}
    for value in targets:
        global_values.note_unknown(replica_slice, value)
        for name in row_labels.custom_gradients_behind(value):
            replica_slice.note_unknown(f"the custom gradient {name!r}")
    flat_sources = tf.nest.flatten(sources)
    if kinds <= {Kind.ROWS} and all(map(_is_of_rows, flat_sources)):
        return _gradient_of_sums(replica_slice, compute, target, sources, **options)
    is_linear = kinds <= {Kind.ALIKE, Kind.MEAN, Kind.LOCAL}
    are_unknown = list(map(is_of_several_rows, flat_sources))
    if is_linear or all(are_unknown):
        gradients = compute(target, sources, **options)
    else:
        with asked_tape.set_to(tape):
            gradients = _gradient_of_built(builder, compute, targets, sources, is_recorded, options)
    results = _by_source(replica_slice, sources, gradients)
    if any(are_unknown):
        replica_slice.note_unknown(_BY_SEVERAL_ROWS)
        unknown = itertools.compress(
            zip(flat_sources, tf.nest.flatten(results), strict=True), are_unknown
        )
        for source, value in unknown:
            is_connected = any(_is_computed_from(target, source) for target in targets)
            _mark_unknown(builder, source, value, is_connected=is_connected)
    return results


def _gradient_of_built(
    builder: Builder,
    compute: Gradient,
    targets: Sequence[tf.Tensor],
    sources: Any,
    is_recorded: bool,
    options: dict[str, Any],
) -> Any:
    """Returns the gradient of values of the global batch, which no tape has recorded.

    The gradients by those tensors of the step from which the values are built go on by the tape.
    """
    built = [builder.summed(t) for t in targets]
    leaves = builder.leaves_behind(built)
    seeds = builder.gradients(built, leaves)
    pairs = [(leaf, seed) for leaf, seed in zip(leaves, seeds, strict=True) if seed is not None]
    # An outer tape records no lookups, so their gradients are dense.
    are_dense = [is_recorded or not isinstance(seed, tf.IndexedSlices) for _, seed in pairs]
    dense = list(itertools.compress(pairs, are_dense))
    lookups = [pair for pair, is_dense in zip(pairs, are_dense, strict=True) if not is_dense]
    own = [tf.convert_to_tensor(seed) for _, seed in dense]
    if is_recorded:
        own = [builder.factor_on_tape(seed) for seed in own]
    if dense:
        options = options | {"output_gradients": own}
        gradients = compute([leaf for leaf, _ in dense], sources, **options)
    else:
        # No source has a gradient by a constant.
        gradients = compute(tf.zeros([]), sources, **options | {"output_gradients": None})
    return _with_lookups(gradients, sources, lookups) if lookups else gradients


def _mark_unknown(builder: Builder, source: tf.Tensor, value: Any, *, is_connected: bool) -> None:
    """Labels a gradient by a tensor of several rows that no tape watches, or refuses it.

    Values of the global batch are built from the rows, and do not depend on such a tensor.

    Args:
        builder: has built the target.
        source: the tensor.
        value: the gradient, or None.
        is_connected: whether the step computes the target from the tensor.

    Raises:
        ModelError: there is no gradient, since the target was built again.
    """
    if isinstance(value, tf.Tensor):
        row_labels.mark(value, row_labels.local(_BY_SEVERAL_ROWS))
    elif builder.has_built(source) and is_connected:
        raise ModelError(
            f"the step takes {_BY_SEVERAL_ROWS}, such as the output of a layer that mixes rows. "
            "Call tape.watch(tensor) before you use the tensor."
        )


def _with_lookups(gradients: Any, sources: Any, lookups: Sequence[tuple[tf.Tensor, Any]]) -> Any:
    """Returns gradients with those of lookups (`tf.IndexedSlices`), which a tape would make dense.

    Args:
        gradients: the gradients of everything else.
        sources: variables or tensors.
        lookups: tensors of the user's step, such as tables, each with the gradient by it.
    """
    graph = tf.compat.v1.get_default_graph()
    inputs = [graph.capture(getattr(s, "handle", s)) for s in tf.nest.flatten(sources)]
    totals = tf.nest.flatten(gradients)
    record = asked_tape.get()
    unrecorded = record.unrecorded() if record is not None and record.graph is graph else set()
    for leaf, seed in lookups:
        before = [t for op in _operations_behind(leaf) if op.name in unrecorded for t in op.outputs]
        stops = [t for t in before if t.op.type != "Placeholder"]
        found = tf.gradients(leaf, inputs, grad_ys=seed, stop_gradients=stops)
        totals = [_added(*pair) for pair in zip(totals, found, strict=True)]
    return tf.nest.pack_sequence_as(gradients, totals)


def _operations_behind(value: tf.Tensor) -> Iterator[tf.Operation]:
    """Yields the operations from which a tensor is computed, in its own graph."""
    seen, stack = set(), [value.op]
    while stack:
        op = stack.pop()
        if op.name not in seen:
            seen.add(op.name)
            yield op
            stack += [t.op for t in op.inputs]


def _is_computed_from(value: tf.Tensor, source: tf.Tensor) -> bool:
    """Returns whether a tensor is computed from another one of its graph."""
    found = _operations_behind(value)
    return value is source or any(t is source for op in found for t in op.inputs)


def _added(one: Any, other: Any) -> Any:
    """Returns the sum of two gradients, each of which may be None or of lookups."""
    if one is None or other is None:
        return one if other is None else other
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        values = tf.concat([one.values, other.values], 0)
        indices = tf.concat([one.indices, other.indices], 0)
        return tf.IndexedSlices(values, indices, one.dense_shape)
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)


def _gradient_in_branch(
    replica_slice: ReplicaSlice, original: Gradient, target: Any, sources: Any, **options: Any
) -> Any:
    """Returns a gradient inside a condition or a loop, where replicas cannot exchange values.

    Raises:
        ModelError: the gradient of one device needs values of other replicas.
    """
    targets = tf.nest.flatten(target)
    kinds = {label_of(t).kind for t in targets}
    for value in targets:
        global_values.note_unknown(replica_slice, value)
    if kinds <= {Kind.ROWS, Kind.ALIKE, Kind.MEAN, Kind.LOCAL}:
        return _gradient_of_sums(replica_slice, original, target, sources, **options)
    raise ModelError(
        "the train_step takes a gradient inside a condition or a loop, of a value that needs the "
        "rows of all replicas, which cannot be exchanged there. Compute the value there, "
        "and take its gradient outside, or compute both values and choose one by tf.where."
    )


def _gradient_of_sums(
    replica_slice: ReplicaSlice, original: Gradient, target: Any, sources: Any, **options: Any
) -> Any:
    """Returns the gradient of rows that are summed over all replicas, and of means.

    A BatchNormalization takes the gradients behind it for parts of a mean over the replicas. So
    the gradients that begin at rows are divided by this replica's weight. Later `_by_source`
    multiplies the gradients by rows with the weight, and `reduce_gradients` those by variables.
    """
    inverse_weight = tf.math.reciprocal_no_nan(replica_slice.weight)

    def seed(value: Any) -> Any:
        if not isinstance(value, tf.Tensor):
            return None
        is_of_rows = label_of(value).kind is Kind.ROWS
        return tf.ones_like(value) * (tf.cast(inverse_weight, value.dtype) if is_of_rows else 1)

    options["output_gradients"] = tf.nest.map_structure(seed, target)
    return _by_source(replica_slice, sources, original(target, sources, **options))


def _is_of_rows(source: Any) -> bool:
    """Returns whether a tensor has the rows of the batch along axis 0."""
    return isinstance(source, tf.Tensor) and label_of(source).kind in (Kind.ROWS, Kind.MIXED)


def labelled_jacobian(target: Any, source: Any, jacobian: Any) -> Any:
    """Labels the matrices by which `batch_jacobian` differentiates rows, and returns them.

    With a custom gradient, such as that of BatchNormalization, a row may depend on others.
    """
    is_by_rows = _is_of_rows(source) and label_of(target).kind is Kind.ROWS
    if is_by_rows and not custom_gradients.are_behind(target):
        return _labelled_rows(source, jacobian)
    return jacobian


def _labelled_rows(source: tf.Tensor, value: Any) -> Any:
    """Labels a gradient as rows, in the parts of the source, and returns it."""
    if isinstance(value, tf.Tensor):
        row_labels.mark(value, row_labels.rows(label_of(source).parts))
    return value


def _by_source(replica_slice: ReplicaSlice, sources: Any, gradients: Any) -> Any:
    """Labels gradients. Gradients by rows become those of one device."""
    flat_sources, flat_gradients = tf.nest.flatten(sources), tf.nest.flatten(gradients)
    if len(flat_sources) != len(flat_gradients):
        return gradients
    results = []
    for source, value in zip(flat_sources, flat_gradients, strict=True):
        if not isinstance(value, tf.Tensor):
            if isinstance(value, tf.IndexedSlices):
                mark_of_tape(value)
            results.append(value)
            continue
        label = label_of(source) if isinstance(source, tf.Tensor) else row_labels.ALIKE
        if _is_of_rows(source):
            value = _labelled_rows(source, value * tf.cast(replica_slice.weight, value.dtype))
        elif label.kind in (Kind.ALIKE, Kind.MEAN):
            row_labels.mark(value, row_labels.MEAN)
        else:
            row_labels.mark(value, row_labels.local(_BY_SEVERAL_ROWS))
        results.append(value)
    return tf.nest.pack_sequence_as(gradients, results)

"""Patches of gradient tapes: the target of a gradient becomes that of the global batch.

Each replica computes its own part of the gradient. The mean of these parts over the replicas, each
weighted by its rows, is the gradient of the global batch (`distribution.global_gradients`).

| what | private name | upstream | can go when |
|---|---|---|---|
| `_recomputed` | `custom_gradient._graph_mode_decorator` | none | a graph tells that a custom gradient is that of `tf.recompute_grad` |
| `_push`, `_pop` | `GradientTape._push_tape`, `_pop_tape`, `_tape` | none | a tape tells which operations it has recorded |
| `_has_gradient` | `ops.get_gradient_function` | none | an operation tells whether it has a gradient |
"""  # noqa: E501

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import ops
from tensorflow.python.ops import custom_gradient as custom_gradient_module

from tfmulti.distribution import (
    custom_gradients,
    global_gradients,
    global_values,
    losses,
    row_labels,
)
from tfmulti.distribution.custom_gradients import mark_formula
from tfmulti.distribution.replica_slice import ReplicaSlice, partial
from tfmulti.distribution.row_rules import Kind
from tfmulti.distribution.tape_records import TapeRecord
from tfmulti.keras_patches.patching import in_replica_slice, replace

# What the tapes of steps have recorded.
_records: weakref.WeakKeyDictionary[tf.GradientTape, TapeRecord] = weakref.WeakKeyDictionary()


def install() -> None:
    """Patches the methods of `tf.GradientTape`, and the gradients of `tf.recompute_grad`."""
    replace(tf.GradientTape, "_push_tape", in_replica_slice(_push))
    replace(tf.GradientTape, "_pop_tape", in_replica_slice(_pop))
    replace(tf.GradientTape, "watch", in_replica_slice(_watch))
    replace(tf.GradientTape, "gradient", _gradient)
    replace(tf.GradientTape, "batch_jacobian", in_replica_slice(_batch_jacobian))
    replace(custom_gradient_module, "_graph_mode_decorator", in_replica_slice(_recomputed))
    custom_gradients.Registry.has_gradient = staticmethod(_has_gradient)


def _has_gradient(op: tf.Operation) -> bool:
    """Returns whether TensorFlow has a gradient for an operation."""
    try:
        ops.get_gradient_function(op)
    except LookupError:
        return False
    return True


def _watch(
    original: Callable[..., Any], replica_slice: ReplicaSlice, tape: tf.GradientTape, tensor: Any
) -> None:
    """Watches a tensor, and its value on one device if it depends on several rows."""
    known = _records.get(tape)
    for value in tf.nest.flatten(tensor, expand_composites=True):
        if known is not None and isinstance(value, tf.Tensor):
            known.watch(value, is_followed=record.should_record_backprop([value]))
    original(tape, tensor)
    for value in tf.nest.flatten(tensor, expand_composites=True):
        if not global_values.depends_on_several_rows(replica_slice, value):
            continue
        is_outside = known is not None and not known.has_recorded(value)
        # The tape has not recorded how the value was computed, but an outer tape may have.
        with tape.stop_recording() if is_outside else contextlib.nullcontext():
            of_one_device = global_values.watched_by_tape(replica_slice, value)
        original(tape, of_one_device)
        if known is not None:
            known.watch(of_one_device, is_followed=True)


def _push(original: Callable[..., Any], replica_slice: ReplicaSlice, tape: tf.GradientTape) -> None:
    """Notes that the tape begins to record, or goes on after it was stopped."""
    is_new = tape._tape is None
    original(tape)
    if tf.executing_eagerly():
        return
    if is_new or tape not in _records:
        _records[tape] = TapeRecord(tf.compat.v1.get_default_graph(), _replica())
    _records[tape].begin()


def _pop(original: Callable[..., Any], replica_slice: ReplicaSlice, tape: tf.GradientTape) -> None:
    """Notes that the tape records no longer, until it may go on."""
    original(tape)
    if tape in _records:
        _records[tape].end()


def is_lost(value: tf.Tensor, rows: tf.Tensor) -> bool:
    """Returns whether a tape records now that has recorded a tensor, but not the rows made of it.

    Args:
        value: a tensor of the step.
        rows: the rows that one device computes for this replica, in place of the tensor.
    """
    here = value.graph, _replica()
    own = [r for r in list(_records.values()) if (r.graph, r.replica) == here and r.is_recording]
    return any(r.has_recorded(value) and not r.follows(rows) for r in own)


def _replica() -> int:
    """Returns the index of the replica whose step is traced in this thread."""
    context = tf.distribute.get_replica_context()
    return int(tf.get_static_value(context.replica_id_in_sync_group))


def _gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `gradient` that differentiates what one device would have computed."""

    def gradient(
        self: Any,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        replica_slice = partial()
        if replica_slice is None or output_gradients is not None:
            return original(self, target, sources, output_gradients, unconnected_gradients)
        # Without labels a vector is assumed to be the losses of rows, and its gradient is that of
        # their sum over all replicas.
        with row_labels.kept_in_branch() as is_branch:
            has_labels = is_branch or row_labels.are_kept()
        if not has_labels:
            output_gradients = tf.nest.map_structure(
                lambda t: losses.first_gradient(replica_slice, t), target
            )
        compute = functools.partial(original, self)
        # This tape no longer records outside its context, but an outer tape may.
        recorded = record.could_possibly_record()
        return global_gradients.gradient(
            replica_slice,
            compute,
            target,
            sources,
            tape=_records.get(self),
            is_recorded=recorded,
            output_gradients=output_gradients,
            unconnected_gradients=unconnected_gradients,
        )

    return gradient


def _batch_jacobian(
    original: Callable[..., Any],
    replica_slice: ReplicaSlice,
    tape: tf.GradientTape,
    target: Any,
    source: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Labels the matrices of the rows, since TensorFlow computes them by operations on all rows."""
    jacobian = original(tape, target, source, *args, **kwargs)
    return global_gradients.labelled_jacobian(target, source, jacobian)


def _recomputed(
    original: Callable[..., Any], replica_slice: ReplicaSlice, function: Any, *args: Any
) -> Any:
    """Says that the gradient of `tf.recompute_grad` is that of the operations of its function.

    The tape does not record these operations. So a result that mixes rows, whose operations would
    have to be computed again from the rows of all replicas, stays unknown. Layers within any
    function with a custom gradient get their inputs as they are, on which its gradient is based.
    """
    results = original(_without_rows_of_one_device(function), *args)
    is_of_tensorflow = getattr(function, "__module__", "") == custom_gradient_module.__name__
    if is_of_tensorflow and function.__qualname__.startswith("recompute_grad."):
        tensors = tf.nest.flatten(results)
        kinds = {row_labels.label_of(t.op.inputs[t.value_index]).kind for t in tensors}
        if kinds <= {Kind.ROWS, Kind.MEAN, Kind.ALIKE}:
            mark_formula(results)
    return results


def _without_rows_of_one_device(function: Any) -> Any:
    """Returns a function for a custom gradient, in which layers get their inputs as they are."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with custom_gradients.is_inside.set_to(True):
            results, gradient = function(*args, **kwargs)

        @functools.wraps(gradient)
        def inside(*upstream: Any, **options: Any) -> Any:
            with custom_gradients.is_inside.set_to(True):
                return gradient(*upstream, **options)

        return results, inside

    return call

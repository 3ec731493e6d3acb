"""Computes a step of `evaluate` or `predict` with the whole global batch on each replica.

Usually a replica computes its own rows. Tracing may show a value of which it is not known how it
depends on the rows. Then the step is traced again, and each replica computes all rows, as one
device does. The replicas gain no speed by that, but the numbers are right. In a graph that is not
traced (`run_eagerly`) all code of the user's own counts as not known.

`prepare(model, verify=False)` turns this off.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import keras
import tensorflow as tf

from tfmulti.distribution import connections, replica_context
from tfmulti.distribution.replica_slice import ReplicaSlice, computing
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import ModelError
from tfmulti.keras_patches.model_structure import all_metric_variables
from tfmulti.keras_patches.random_numbers import generators_restored_on_error
from tfmulti.training.state.trainer_state import state_of

Result = TypeVar("Result")


class WholeBatchNeededError(Exception):
    """Raised while tracing a step whose values are not known to be right by rows."""


def is_used(model: keras.Model, step: str) -> bool:
    """Returns whether each replica computes the whole batch in a step, such as `test_step`."""
    return step in state_of(model).traced.whole_batch


def begin(model: keras.Model, step: str) -> None:
    """Makes each replica compute its own rows, until a trace of the step shows unknown values."""
    traces = state_of(model).traced
    traces.whole_batch.discard(step)
    traces.agreed.discard(step)


def may_be_used(model: keras.Model) -> bool:
    """Returns whether there are several replicas, and whole batches are not turned off."""
    several = placement_of(model.distribute_strategy).replicas > 1
    return several and state_of(model).options.verify is not False


def use_if_any(model: keras.Model, step: str, reason: str | None) -> bool:
    """Makes each replica compute the whole batch from now on if any worker has a reason for it.

    All workers must call it, outside of a running step. The chief warns of the first reason.

    Args:
        model: the prepared model.
        step: `test_step` or `predict_step`.
        reason: this worker's reason, as words that follow "because", or None.

    Returns:
        Whether a worker has a reason, the same on all workers.
    """
    placement = placement_of(model.distribute_strategy)
    reasons = [reason or ""]
    if placement.workers > 1:
        with tf.init_scope():
            sent = connections.exchange(placement, f"reason of the {step}", reasons[0].encode())
        reasons = [each.decode() for each in sent]
    reason = next(filter(None, reasons), None)
    if reason is None:
        return False
    state_of(model).traced.whole_batch.add(step)
    if placement.is_chief:
        warnings.warn(
            f"each replica computes the whole batch in the {step}, because {reason}. So more "
            "replicas make it no faster. If each row depends on its own inputs alone, turn this "
            "off: prepare(model, verify=False).",
            stacklevel=2,
        )
    return True


def traced(model: keras.Model, step: str, run: Callable[[], Result]) -> Result:
    """Returns `run()`, which runs a step on all replicas, unless its trace shows unknown values.

    After `prepare(model, verify=False)` unknown values change nothing. All workers must make the
    first trace of a step at the same time.

    Args:
        model: the prepared model.
        step: `test_step` or `predict_step`.
        run: runs the step, or adds it to the graph that is traced.

    Raises:
        WholeBatchNeededError: it is not known how a value depends on the rows, on this worker or
            on another.
        ModelError: the same in a later trace of one of several workers.
    """
    if tf.executing_eagerly() or is_used(model, step) or not may_be_used(model):
        return run()
    traces = state_of(model).traced
    with generators_restored_on_error():
        results = run()
        unknown = next(iter(traces.unknown.pop(step, {})), None)
        reason = unknown and f"it is not known how values from {unknown} depend on the rows"
        if step not in traces.agreed:
            is_needed = use_if_any(model, step, reason)
            if placement_of(model.distribute_strategy).workers > 1:
                traces.agreed.add(step)
            if is_needed:
                raise WholeBatchNeededError
        elif reason is not None:
            raise ModelError(
                f"the first batch of the {step} was computed by rows, but for this batch {reason}. "
                "Give all batches the same shapes and types. Or, if each row depends on its own "
                "inputs alone: prepare(model, verify=False)."
            )
    return results


def with_new_functions(call: Callable[[], Result], compile_again: Callable[[], None]) -> Result:
    """Returns what `call` returns, by new functions if tracing shows that it needs whole batches.

    A `tf.function` whose first trace has failed cannot make variables any more.

    Args:
        call: calls compiled functions.
        compile_again: makes new compiled functions for `call`.
    """
    with contextlib.suppress(WholeBatchNeededError):
        return call()
    compile_again()
    return call()


def computed(
    model: keras.Model, step: Callable[[Any], Result], data: Any, replica_slice: ReplicaSlice
) -> Result:
    """Returns `step(rows)` for the rows of all replicas. Call it in replica context.

    Each replica's metrics have the states of all replicas in the step. Afterwards the first replica
    has the new states, and the others have zeros, so that the sum over the replicas is right.

    Args:
        model: the prepared model.
        step: what to compute.
        data: the rows that this replica reads.
        replica_slice: this replica's slice.
    """
    replica_slice.note_gather()
    is_first = tf.distribute.get_replica_context().replica_id_in_sync_group == 0
    # Layers need at least one row, although no row of the batch may count.
    has_rows = replica_slice.global_rows > 0
    sent_rows = tf.where(has_rows, replica_slice.own_rows, tf.cast(is_first, tf.int64))
    own_rows = replica_context.rows_of(data, 0, sent_rows)
    try:
        rows = replica_context.gather_batch(own_rows, replica_slice)
    except ModelError as error:
        advice = "Or, if each row depends on its own inputs alone: prepare(model, verify=False)."
        raise ModelError(f"{error} {advice}") from None
    variables = all_metric_variables(model)
    states = replica_context.states_of_metrics(variables)
    for variable, state in zip(variables, states, strict=True):
        variable.assign(state)
    with computing(replica_slice.of_all_rows()):
        results = step(rows)
    for variable, state in zip(variables, states, strict=True):
        new_state = tf.where(has_rows, tf.convert_to_tensor(variable.value), state)
        counts = is_first if variable.aggregation != "mean" else True
        variable.assign(tf.where(counts, new_state, tf.zeros_like(new_state)))
    return results


def rows_of_first(outputs: Any) -> Any:
    """Returns all rows of the outputs on the first replica, and none on the others."""
    is_first = tf.distribute.get_replica_context().replica_id_in_sync_group == 0

    def rows(value: Any) -> Any:
        count = tf.shape(value, tf.int64)[0]
        return replica_context.rows_of(value, 0, tf.where(is_first, count, 0))

    return tf.nest.map_structure(rows, outputs)

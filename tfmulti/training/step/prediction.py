"""Compiles the function that `predict` calls for each batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfmulti.distribution import (
    collectives,
    connections,
    global_values,
    python_attributes,
    replica_context,
    row_labels,
)
from tfmulti.distribution.replica_slice import ReplicaSlice, computing, current
from tfmulti.distribution.strategies import placement_of, run_on_replicas
from tfmulti.keras_patches import installation
from tfmulti.keras_patches.model_structure import all_metric_variables
from tfmulti.keras_patches.random_numbers import share_generator, step_generator
from tfmulti.keras_patches.tracing import optimized_once
from tfmulti.training.input.worker_batch import Ahead, BatchQueue, unknown_rows_explained
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step import whole_batch
from tfmulti.training.step.execution import report_trace
from tfmulti.training.step.python_effects import PythonEffects
from tfmulti.training.step.step import (
    found_in,
    next_batch,
    slice_in_step,
    states_in,
    step_of,
    warn_of_addends,
    warn_of_outputs,
    warn_of_unknown,
    without_autograph,
)
from tfmulti.training.step.step_result import digest_by_rank, first_local
from tfmulti.training.step.xla import xla_compiled


class Predicted(NamedTuple):
    """The model's outputs for a global batch, with its rows in order, the same on every worker.

    Attributes:
        outputs: the outputs of all rows.
        lost: how many examples of the batch could not be read. The caller raises an error then.
        digests: the digest of each worker's batch, by rank. The caller raises an error if they
            differ.
    """

    outputs: Any
    lost: Any
    digests: Any


def make_prediction(model: keras.Model) -> Callable[[Any], Predicted]:
    """Returns `predict(source)`, which takes one global batch and returns a `Predicted`.

    Every worker must call it, and gets the outputs of all rows. The source is a queue, an iterator
    of global batches, a `WorkerBatch`, or an Optional of a batch.
    """
    strategy = model.distribute_strategy
    placement = placement_of(strategy)
    installation.install()
    seeds = step_generator(model)
    whole_batch.begin(model, "predict_step")
    any_rows = placement.replicas > 1 and not model.run_eagerly
    own_step = step_of(model, "predict_step")

    def outputs_of(data: Any) -> Any:
        replica_slice = current()
        assert replica_slice is not None
        python_attributes.restore(replica_slice.attributes)
        with unknown_rows_explained(are_unknown=any_rows):
            return own_step(data)

    step = xla_compiled(model, outputs_of, "predict_step")

    def predict(source: Any) -> Predicted:
        report_trace()
        batch = next_batch(source, placement)
        batch = batch.of_any_rows() if any_rows else batch
        # A single worker ends its reading at the first example that it cannot read.
        may_lose = placement.workers > 1 and isinstance(source, BatchQueue)
        found = found_in(model)
        states = states_in(model, found) if any_rows else {}
        effects = PythonEffects(model, "predict_step", found)

        def replica_step() -> Predicted:
            effects.begin_replica()
            with collectives.serving("prediction", placement):
                return predict_rows()

        def predict_rows() -> Predicted:
            index = replica_context.local_index(placement.local_replicas)
            replica_slice = slice_in_step(batch, index, model, seeds, "predict_step")
            replica_slice = replica_slice._replace(states=states, attributes=effects.attributes)
            if whole_batch.is_used(model, "predict_step"):
                outputs = whole_batch.computed(model, step, batch.data[index], replica_slice)
                outputs = whole_batch.rows_of_first(outputs)
            else:
                outputs = outputs_of_own_rows(batch.data[index], replica_slice)
            if placement.workers == 1:
                return Predicted(outputs, batch.lost, [])
            lost = tf.cast(batch.lost if index == 0 else 0, tf.float32)
            digests = digest_by_rank(batch, index, placement)
            digests, *summed = replica_context.sum_by_dtype([digests, *([lost] * may_lose)])
            lost = summed[0] if may_lose else lost
            outputs = tf.nest.map_structure(replica_context.gather_rows, outputs)
            return Predicted(outputs, lost, digests)

        def outputs_of_own_rows(data: Any, replica_slice: ReplicaSlice) -> Any:
            if replica_slice.is_whole:
                with computing(replica_slice):
                    return step(data)
            row_labels.begin(data, all_metric_variables(model))
            with computing(replica_slice):
                own_rows = functools.partial(global_values.own_rows, replica_slice)
                return tf.nest.map_structure(own_rows, step(data))

        with effects.explained():
            by_replica = whole_batch.traced(
                model, "predict_step", lambda: run_on_replicas(strategy, replica_step)
            )
        effects.end([])
        warn_of_outputs(model, "predict_step")
        share_generator(seeds, is_traced_again=effects.has_any)
        if placement.workers > 1:
            predicted: Predicted = first_local(strategy, by_replica)
            return predicted
        outputs = tf.nest.map_structure(
            lambda v: tf.concat(strategy.experimental_local_results(v), axis=0), by_replica.outputs
        )
        return Predicted(outputs, batch.lost, [])

    function: Any = predict

    def compile_again() -> None:
        nonlocal function
        state_of(model).traced.values.pop("predict_step", None)
        function = without_autograph(predict)

    if not model.run_eagerly:
        compile_again()

    @connections.own_errors(placement)
    def call(source: Any) -> Predicted:
        given = source.queue if isinstance(source, Ahead) else source
        with optimized_once():
            predicted: Predicted = whole_batch.with_new_functions(
                lambda: function(given), compile_again
            )
        warn_of_unknown(model, "predict_step")
        shapes = [outputs.shape for outputs in tf.nest.flatten(predicted.outputs)]
        rows = next((shape[0] for shape in shapes if shape.rank), None)
        warn_of_addends(model, "predict_step", rows or 0)
        return predicted

    return call

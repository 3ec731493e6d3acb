"""One step on all local replicas: what it takes, and how each replica computes its share."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfmulti.distribution import collectives, replica_context, row_labels
from tfmulti.distribution.replica_slice import ReplicaSlice, computing
from tfmulti.distribution.strategies import Placement
from tfmulti.keras_patches import layers
from tfmulti.keras_patches.model_structure import all_metric_variables
from tfmulti.keras_patches.random_numbers import share_generator
from tfmulti.keras_patches.tracing import by_autograph
from tfmulti.training.input.pipeline import from_batch
from tfmulti.training.input.worker_batch import BatchQueue, IndexQueue, WorkerBatch
from tfmulti.training.state import relocation
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step import microbatches, xla
from tfmulti.training.step.step_logs import StepLogs
from tfmulti.training.step.step_result import first_local


def without_autograph(function: Callable[..., Any]) -> Any:
    """Returns a function of ours compiled, without AutoGraph, to which we leave nothing to do.

    It would read each of our functions that the first step calls, about a second in all.
    """
    function = tf.autograph.experimental.do_not_convert(function)
    return tf.function(function, reduce_retracing=True)


def step_of(model: keras.Model, name: str) -> Callable[[Any], Any]:
    """Returns `train_step`, `test_step` or `predict_step`, with AutoGraph where it is the user's.

    Keras gives a step of the user's own to AutoGraph only within a `@tf.function`, which is taken
    off: it could not reduce. Here any step of the user's own may have conditions on tensors.
    """
    step = getattr(model, name)
    step = getattr(step, "python_function", step)
    is_keras = getattr(type(model), name, None) is getattr(keras.Model, name)
    return step if is_keras or model.run_eagerly else by_autograph(step)


def taken(source: Any, placement: Placement) -> WorkerBatch:
    """Returns what a step takes; of a global batch it keeps this worker's rows, on the host."""
    if isinstance(source, WorkerBatch):
        return source
    if isinstance(source, (BatchQueue, IndexQueue)):
        return source.take()
    found: Any = source if isinstance(source, tf.experimental.Optional) else next(source)
    batch = found.get_value() if isinstance(found, tf.experimental.Optional) else found
    with tf.device("CPU:0"):
        shards: WorkerBatch = from_batch(batch, placement)
    return shards


def agreed(model: keras.Model, placement: Placement) -> Callable[[Any], WorkerBatch] | None:
    """Returns a function that adds the numbers of all workers' rows to a batch, if needed.

    Where examples that cannot be read are left out, no worker knows how many rows the others
    have: they tell each other, by one small collective a step.
    """
    if not state_of(model).reading.skip_bad_records or placement.workers == 1:
        return None
    strategy = model.distribute_strategy
    local = range(placement.first_replica, placement.first_replica + placement.local_replicas)

    def take(source: Any) -> WorkerBatch:
        shards = taken(source, placement)

        def rows_of_all() -> tf.Tensor:
            replica = placement.first_replica + replica_context.local_index(
                placement.local_replicas
            )
            own = shards.own_rows[replica - placement.first_replica]
            mine = tf.one_hot(
                replica, placement.replicas, tf.cast(own, tf.int32), 0, dtype=tf.int32
            )
            return replica_context.sum_together([mine])[0]

        counts = tf.cast(first_local(strategy, strategy.run(rows_of_all)), tf.int64)
        ends, rows = tf.cumsum(counts), tf.reduce_sum(counts)
        first_rows = tf.minimum(ends - counts, tf.maximum(rows - 1, 0))
        own = tuple(first_rows[replica] for replica in local)
        return shards._replace(first_rows=own, rows=rows)

    return take


def states_of_its_own(model: keras.Model) -> dict[int, str]:
    """Returns the variables that the user's own code changes in a step (`ReplicaSlice.states`)."""
    places = relocation.find(model).places  # variables of TensorFlow's own
    return layers.states_of_its_own(model) | {id(p.variable): "layer" for p in places}


def make_step(
    model: keras.Model, placement: Placement, seeds: Any, logs: StepLogs | None, *, training: bool
) -> Callable[[WorkerBatch], Any]:
    """Returns a function that runs one step on all local replicas and returns their logs.

    It returns the replicas' values of their metrics' variables, too. Without `logs` it returns
    what the steps return as it is.
    """
    strategy = model.distribute_strategy
    state = state_of(model)
    passes = state.microbatches if training else 1
    step = step_of(model, "train_step" if training else "test_step")
    if training:
        step = xla.xla_compiled(model, step, placement)

    def compute(data: Any, share: ReplicaSlice) -> Any:
        fixed = share.read_rows is not None and not model.run_eagerly
        variables = [] if fixed or share.is_whole else replica_context.metric_variables(model)
        before = [tf.identity(v.value) for v in variables]
        if not share.is_whole:
            row_labels.begin(data, all_metric_variables(model))
        with computing(share):
            if logs is None:
                found = step(data)
            else:
                with logs.recorded():
                    found = logs.taken(step(data), share)
        for variable, value in zip(variables, before, strict=True):
            counts = share.own_rows > 0
            variable.assign(tf.where(counts, tf.convert_to_tensor(variable.value), value))
        return found

    has_labels = placement.replicas > 1 and not model.run_eagerly

    def replica_step(shards: WorkerBatch, states: dict[int, str]) -> Any:
        shards = shards.of_any_rows() if has_labels else shards
        local = replica_context.local_index(placement.local_replicas)
        alone, sync = placement.replicas == 1, state.sync_batch_norm
        apart = training and state.outer is not None
        share = shards.share(local, alone=alone, sync_batch_norm=sync, is_local=apart)
        share = share._replace(
            seeds=seeds,
            model=model,
            states=states,
            note_gather=lambda: setattr(state, "gathers", True),
            note_unknown=lambda reason: state.unknown.setdefault(reason),
        )
        with collectives.serving("step", placement):
            if passes == 1:
                found = compute(shards.data[local], share)
            else:
                found = microbatches.run(model, compute, shards.data[local], share, passes)
        # Told here, the metrics wait for nothing else in the step: their sums are on the way
        # while the weights are updated.
        return found, [tf.identity(v.value) for v in replica_context.metric_variables(model)]

    def one_step(shards: WorkerBatch) -> Any:
        python = random.getstate()
        states = states_of_its_own(model) if has_labels else {}

        def alike(shards: WorkerBatch = shards) -> Any:
            random.setstate(python)  # AugMix draws by it, once, when a replica is traced
            return replica_step(shards, states)

        found = strategy.run(alike)
        share_generator(seeds)
        return found

    return one_step if model.run_eagerly else without_autograph(one_step)


def warn_of_unknown(model: keras.Model, placement: Placement, step: str) -> None:
    """Says of which values it is not known that they are one device's, unless that was seen."""
    state = state_of(model)
    if not state.unknown:
        return
    reason = next(iter(state.unknown))
    state.unknown.clear()
    found = state.verification
    is_compared = found is not None and found.verdict == "same" and step == "train_step"
    if placement.is_chief and not is_compared:
        warnings.warn(
            f"it is not known whether values of the {step} are those of one device: they depend on "
            f"{reason}. Compare the first step with one device: prepare(model, verify=True).",
            stacklevel=4,
        )

"""One step on all local replicas: how it gets a batch, and how each replica computes its slice."""

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
    """Returns a function of tfmulti as a `tf.function` without AutoGraph.

    tfmulti's functions need no AutoGraph. It would read each of them that the first step calls,
    which takes about a second in all.
    """
    function = tf.autograph.experimental.do_not_convert(function)
    return tf.function(function, reduce_retracing=True)


def step_of(model: keras.Model, name: str) -> Callable[[Any], Any]:
    """Returns a model's step function, converted by AutoGraph if it is the user's own.

    A `@tf.function` around the step is removed, because replicas cannot reduce inside it. Keras
    leaves AutoGraph to such a `@tf.function`. With this conversion any step of the user's own may
    have conditions on tensors.

    Args:
        model: the model.
        name: `train_step`, `test_step` or `predict_step`.
    """
    step = getattr(model, name)
    step = getattr(step, "python_function", step)
    is_keras = getattr(type(model), name, None) is getattr(keras.Model, name)
    return step if is_keras or model.run_eagerly else by_autograph(step)


def taken(source: Any, placement: Placement) -> WorkerBatch:
    """Returns the next `WorkerBatch` of a source.

    A source of global batches gives this worker's rows of the next one, which stay on the host.

    Args:
        source: a queue, an iterator of global batches, a `WorkerBatch`, or an Optional of a batch.
        placement: this process' place among the workers.
    """
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
    """Returns a function that takes a batch and corrects its row numbers, or None if not needed.

    With `skips_bad` each worker leaves out the examples that it cannot read. So no worker knows how
    many rows the others have. The workers exchange these numbers in one small collective
    for each step.
    """
    if not state_of(model).reading.skips_bad or placement.workers == 1:
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
    # The user may also hold variables that are plain `tf.Variable`s.
    places = relocation.find(model).places
    return layers.states_of_its_own(model) | {id(p.variable): "layer" for p in places}


def make_step(
    model: keras.Model, placement: Placement, seeds: Any, logs: StepLogs | None, *, training: bool
) -> Callable[[WorkerBatch], Any]:
    """Returns a function that runs one step of a `WorkerBatch` on all local replicas.

    Args:
        model: the prepared model.
        placement: this process' place among the workers.
        seeds: the generator for draws without a seed, or None for Keras' own.
        logs: takes the logs that the model's step returns; None leaves them as they are.
        training: whether the step is `train_step` or `test_step`.

    Returns:
        A function whose result has, for each local replica, the step's logs and the values of the
        metrics' variables.
    """
    strategy = model.distribute_strategy
    state = state_of(model)
    passes = state.options.microbatches if training else 1
    step = step_of(model, "train_step" if training else "test_step")
    if training:
        step = xla.xla_compiled(model, step, placement)

    def compute(data: Any, share: ReplicaSlice) -> Any:
        # A replica without rows reads one that does not count. Its metrics are put back after the
        # step. Where the number of rows is known when the step is traced, every replica has rows.
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
        alone, sync = placement.replicas == 1, state.options.sync_batch_norm
        share = shards.share(local, alone=alone, sync_batch_norm=sync)
        share = share._replace(
            seeds=seeds,
            model=model,
            states=states,
            note_gather=lambda: setattr(state.traced, "gathers", True),
            note_unknown=lambda reason: state.traced.unknown.setdefault(reason),
        )
        with collectives.serving("step", placement):
            if passes == 1:
                found = compute(shards.data[local], share)
            else:
                found = microbatches.run(model, compute, shards.data[local], share, passes)
        # The metrics' values are read here, so they wait for nothing else in the step. Their sums
        # travel between workers while the weights are updated.
        return found, [tf.identity(v.value) for v in replica_context.metric_variables(model)]

    def one_step(shards: WorkerBatch) -> Any:
        python = random.getstate()
        states = states_of_its_own(model) if has_labels else {}

        def alike(shards: WorkerBatch = shards) -> Any:
            # A layer of the user's own may draw from Python's generator when a replica is traced.
            # All replicas must draw the same.
            random.setstate(python)
            return replica_step(shards, states)

        found = strategy.run(alike)
        share_generator(seeds)
        return found

    return one_step if model.run_eagerly else without_autograph(one_step)


def warn_of_unknown(model: keras.Model, placement: Placement, step: str) -> None:
    """Warns on the chief if some values of a step may differ from those of one device.

    There is no warning while the first steps are compared with one device, and none for a
    `train_step` that had its numbers there. But a comparison does not settle a condition or a loop,
    which may take another branch in a later step. The warning names the first reason that was noted
    while the step was traced. All noted reasons are then forgotten, so that they give one warning
    only.

    Args:
        model: the prepared model.
        placement: this process' place among the workers.
        step: the name of the step, such as `train_step`.
    """
    state = state_of(model)
    if not state.traced.unknown or state.traced.is_compared_now:
        return
    found = state.verification
    is_compared = found is not None and found.verdict == "same" and step == "train_step"
    reasons = [r for r in state.traced.unknown if not is_compared or row_labels.is_of_condition(r)]
    state.traced.unknown.clear()
    if not reasons or not placement.is_chief:
        return
    advice = "Compare the first step with one device: prepare(model, verify=True)."
    if row_labels.is_of_condition(reasons[0]):
        advice = (
            "A comparison with one device sees only the branch that the first steps take. Use "
            "tf.where instead, which computes both branches."
        )
    warnings.warn(
        f"it is not known whether values of the {step} are those of one device: they depend on "
        f"{reasons[0]}. {advice}",
        stacklevel=4,
    )

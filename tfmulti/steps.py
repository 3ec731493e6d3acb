"""One step on all local replicas: what it takes, and how each replica computes its share."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfmulti import collectives, microbatches, replicas
from tfmulti.outcomes import first_local
from tfmulti.pipeline import from_batch
from tfmulti.shards import ArrayOutlet, Outlet, Shards
from tfmulti.share import Share, computing
from tfmulti.stopping import state_of
from tfmulti.strategies import Placement


def taken(source: Any, placement: Placement) -> Shards:
    """Returns what a step takes; of a global batch it keeps this worker's rows, on the host."""
    if isinstance(source, Shards):
        return source
    if isinstance(source, (Outlet, ArrayOutlet)):
        return source.take()
    found: Any = source if isinstance(source, tf.experimental.Optional) else next(source)
    batch = found.get_value() if isinstance(found, tf.experimental.Optional) else found
    with tf.device("CPU:0"):
        shards: Shards = from_batch(batch, placement)
    return shards


def agreed(model: keras.Model, placement: Placement) -> Callable[[Any], Shards] | None:
    """Returns what takes `Shards` that say of all workers' rows how many there are, if need be.

    Where examples that cannot be read are left out, no worker knows how many rows the others
    have: they tell each other, by one small collective a step.
    """
    if not state_of(model).reading.skip_bad_records or placement.workers == 1:
        return None
    strategy = model.distribute_strategy
    local = range(placement.first_replica, placement.first_replica + placement.local_replicas)

    def take(source: Any) -> Shards:
        shards = taken(source, placement)

        def rows_of_all() -> tf.Tensor:
            replica = placement.first_replica + replicas.local_index(placement.local_replicas)
            own = shards.own_rows[replica - placement.first_replica]
            mine = tf.one_hot(
                replica, placement.replicas, tf.cast(own, tf.int32), 0, dtype=tf.int32
            )
            return replicas.sum_together([mine])[0]

        counts = tf.cast(first_local(strategy, strategy.run(rows_of_all)), tf.int64)
        ends, rows = tf.cumsum(counts), tf.reduce_sum(counts)
        first_rows = tf.minimum(ends - counts, tf.maximum(rows - 1, 0))
        own = tuple(first_rows[replica] for replica in local)
        return shards._replace(first_rows=own, rows=rows)

    return take


def make_step(
    model: keras.Model, placement: Placement, seeds: Any, *, training: bool
) -> Callable[[Shards], Any]:
    """Returns a function that runs one step on all local replicas and returns their logs."""
    strategy = model.distribute_strategy
    state = state_of(model)
    passes = state.microbatches if training else 1

    def compute(data: Any, share: Share) -> Any:
        step = model.train_step if training else model.test_step
        step = getattr(step, "python_function", step)  # of a @tf.function, which could not reduce
        fixed = share.read_rows is not None and not model.run_eagerly
        variables = [] if fixed or share.is_whole else replicas.metric_variables(model)
        before = [tf.identity(v.value) for v in variables]
        with computing(share):
            logs = step(data)
        for variable, value in zip(variables, before, strict=True):
            counts = share.own_rows > 0
            variable.assign(tf.where(counts, tf.convert_to_tensor(variable.value), value))
        return logs

    def replica_step(shards: Shards) -> Any:
        local = replicas.local_index(placement.local_replicas)
        alone, sync = placement.replicas == 1, state.sync_batch_norm
        apart = training and state.outer is not None
        share = shards.share(local, alone=alone, sync_batch_norm=sync, is_local=apart)
        share = share._replace(seeds=seeds, note_gather=lambda: setattr(state, "gathers", True))
        with collectives.serving("step", placement):
            if passes == 1:
                logs = compute(shards.data[local], share)
            else:
                logs = microbatches.run(model, compute, shards.data[local], share, passes)
        # Told here, the metrics wait for nothing else in the step: their sums are on the way
        # while the weights are updated.
        return logs, [tf.identity(v.value) for v in replicas.metric_variables(model)]

    def one_step(shards: Shards) -> Any:
        python = random.getstate()

        def alike(shards: Shards = shards) -> Any:
            random.setstate(python)  # AugMix draws by it, once, when a replica is traced
            return replica_step(shards)

        return strategy.run(alike)

    return one_step if model.run_eagerly else tf.function(one_step, reduce_retracing=True)

"""What an execution found, summed over all replicas by one collective."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfmulti.distribution import collectives, replica_context
from tfmulti.distribution.strategies import Placement
from tfmulti.keras_patches.model_structure import moving_statistics
from tfmulti.training.input.worker_batch import WorkerBatch
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step import local_steps
from tfmulti.training.step.step_logs import Logs, StepLogs


class StepResult(NamedTuple):
    """What an execution returns, the same on every worker.

    `logs` are the last step's logs over the global data, and `epoch_logs` those of an epoch that
    ends here: see `StepLogs.final`. `votes` counts, for each reason to stop, the replicas whose
    worker has it; `digests` has that of each worker's last
    batch, by rank. `rows` are the
    examples of all steps of the execution, `lost` those that could not be read, and `waited_s` the
    seconds that a replica waited for data, on average.
    """

    logs: Logs
    epoch_logs: Logs
    votes: Any  # a tensor, and a list of floats once `epochs.run` has read it
    digests: tf.Tensor
    rows: tf.Tensor
    lost: tf.Tensor
    waited_s: tf.Tensor


class Taken(NamedTuple):
    """What the steps of an execution took from their source, on this worker.

    `rows` has, for each local replica, the rows that count, and then those of all replicas.
    `free_since` is when the last step ended: the next one waits from then on.
    """

    rows: tuple[tf.Tensor, ...]
    lost: tf.Tensor
    waited_s: tf.Tensor
    free_since: tf.Tensor

    @classmethod
    def nothing(cls, placement: Placement) -> Taken:
        rows = tuple(tf.constant(0, tf.int64) for _ in range(placement.local_replicas + 1))
        return cls(rows, tf.constant(0, tf.int64), tf.constant(0, tf.float64), now())

    def counted(self, shards: WorkerBatch) -> Taken:
        """Returns the same with the rows of a step."""
        more = (*shards.own_rows, shards.rows)
        rows = tuple(a + b for a, b in zip(self.rows, more, strict=True))
        return self._replace(rows=rows, lost=self.lost + shards.lost)

    def waited_for(self, came: tf.Tensor) -> Taken:
        """Returns the same when the next step's data has come, at a time."""
        return self._replace(waited_s=self.waited_s + tf.maximum(came - self.free_since, 0))

    def after(self, logs: Any) -> Taken:
        """Returns the same when a step has ended, with these logs."""
        # TensorFlow may take the next step's data while this one runs: that is no waiting. On a
        # GPU a step has ended when what it computes can be brought to the host.
        with tf.device("CPU:0"):
            done = [tf.identity(t) for t in tf.nest.flatten(logs, expand_composites=True)]
        with tf.control_dependencies(done):
            return self._replace(free_since=now())


def now() -> tf.Tensor:
    """Returns the time in seconds; 0 under op determinism, where TensorFlow tells none."""
    with tf.init_scope():  # asked now, not when the step runs
        try:
            tf.timestamp()
        except tf.errors.FailedPreconditionError:
            return tf.constant(0, tf.float64)
    return tf.timestamp()


def time_of(shards: WorkerBatch) -> tf.Tensor:
    """Returns the time at which a batch has come."""
    leaves = tf.nest.flatten(shards.data[0], expand_composites=True)
    data = [leaf for leaf in leaves if leaf is not None][:1]
    with tf.control_dependencies([shards.rows, *data]):  # their number may be known beforehand
        return now()


class Statistics:
    """The moving statistics of a model's layers, averaged over the replicas by their rows.

    Each replica updates its own from its own rows. An execution ends with the same ones
    everywhere: those before it, moved by the mean of the replicas' moves. So what is
    evaluated or saved at any time is the average.
    """

    def __init__(self, model: keras.Model, placement: Placement) -> None:
        sync = state_of(model).sync_batch_norm
        several = placement.replicas > 1
        self._variables = (
            moving_statistics(model, sync_batch_norm=sync, is_local=local_steps.is_on(model))
            if several
            else []
        )
        self._strategy = model.distribute_strategy

    def now(self) -> Any:
        """Returns the values on all replicas."""
        return self._strategy.run(lambda: [tf.identity(v.value) for v in self._variables])

    def moved(self, before: list[tf.Tensor], weight: tf.Tensor) -> list[tf.Tensor]:
        """Returns by how much this replica's have moved, times its weight."""
        return [
            tf.math.multiply_no_nan(tf.convert_to_tensor(v.value) - old, tf.cast(weight, old.dtype))
            for v, old in zip(self._variables, before, strict=True)
        ]

    def set(self, before: list[tf.Tensor], moved: list[tf.Tensor]) -> None:
        """Sets the values on this replica."""
        for variable, old, move in zip(self._variables, before, moved, strict=True):
            variable.assign(old + move)


class Summary:
    """Makes the `StepResult` of a model's executions.

    `outer` moves the weights of workers that take steps of their own (`local_steps`).
    """

    def __init__(
        self, model: keras.Model, placement: Placement, logs: StepLogs, *, training: bool
    ) -> None:
        self._model, self._placement, self._logs = model, placement, logs
        self._statistics = Statistics(model, placement) if training else None
        self._outer = state_of(model).outer if training else None
        self._traces = training and not model.run_eagerly

    def before(self) -> Any:
        """Returns moving statistics and weights as they are before the steps."""
        statistics = self._statistics.now() if self._statistics else ()
        return statistics, self._outer.now() if self._outer else ()

    def after(
        self, shards: WorkerBatch, found: Any, votes: tf.Tensor, before: Any, taken: Taken
    ) -> StepResult:
        """Returns what the steps found, and gives all replicas the same state.

        Args:
            shards: what the last step took.
            found: what it returned: of each replica its logs and the states of its metrics.
            before: what `before` returned.
        """
        strategy = self._model.distribute_strategy
        if self._traces:
            state_of(self._model).traces += 1  # each function of an execution comes here once

        def on_replica(found: Any, before: Any, weights: Any) -> StepResult:
            with collectives.serving("outcome", self._placement):
                return self._on_replica(shards, found, votes, taken, before, weights)

        outcome: StepResult = first_local(strategy, strategy.run(on_replica, args=(found, *before)))
        return outcome

    def _on_replica(
        self,
        shards: WorkerBatch,
        found: Any,
        votes: tf.Tensor,
        taken: Taken,
        before: list[tf.Tensor],
        weights: list[tf.Tensor],
    ) -> StepResult:
        logs, metrics = found
        local = replica_context.local_index(self._placement.local_replicas)
        weight = tf.math.divide_no_nan(
            tf.cast(taken.rows[local], tf.float64), tf.cast(taken.rows[-1], tf.float64)
        )
        moved = self._statistics.moved(before, weight) if self._statistics else []
        outcome, moved = self._summed(logs, metrics, shards, local, votes, taken, moved)
        if self._statistics:
            self._statistics.set(before, moved)
        if self._outer:
            self._outer.step(weights, tf.cast(weight, tf.float32))
        return outcome

    def _summed(
        self,
        logs: Logs,
        metrics: list[tf.Tensor],
        shards: WorkerBatch,
        local: int,
        votes: tf.Tensor,
        taken: Taken,
        moved: list[tf.Tensor],
    ) -> tuple[StepResult, list[tf.Tensor]]:
        """Returns what all replicas found, and `moved` summed over them, from one collective."""
        weight = shards.weight(local)
        place = self._placement
        digest = tf.cast(shards.digest if local == 0 else 0, tf.float32)
        digests = tf.one_hot(place.rank, place.workers) * digest
        waited_s = tf.cast(taken.waited_s, tf.float32)
        lost = tf.cast(taken.lost if local == 0 else 0, tf.float32)
        parts = [_part(value, weight) for value in logs.values()]
        final, sums = replica_context.global_metrics(
            replica_context.metric_variables(self._model),
            metrics,
            lambda sums: self._logs.final(dict(zip(logs, sums, strict=False))),
            [*parts, votes, digests, lost, waited_s, *moved],
        )
        counted, digests, lost, waited_s = sums[len(parts) : len(parts) + 4]
        waited_s /= place.replicas
        outcome = StepResult(*final, counted, digests, taken.rows[-1], lost, waited_s)
        return outcome, sums[len(parts) + 4 :]


def _part(value: Any, weight: tf.Tensor) -> tf.Tensor:
    """Returns what a replica's log adds to the mean by rows."""
    value = value if value.shape.is_fully_defined() else tf.reduce_mean(value)
    value = value if value.dtype == tf.float64 else tf.cast(value, tf.float32)
    return tf.math.multiply_no_nan(value, tf.cast(weight, value.dtype))


def first_local(strategy: tf.distribute.Strategy, values: Any) -> Any:
    return tf.nest.map_structure(lambda v: strategy.experimental_local_results(v)[0], values)

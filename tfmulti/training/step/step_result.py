"""The result of an execution, summed over all replicas by one collective.

The collective carries the metrics' states, the workers' votes, a digest of the batch, and the
changes of the moving statistics. So all workers get the same logs, make the same decisions, and
have the same state after each execution.

Votes, digests and counts are whole numbers, and travel as float32 beside the metrics. Their sums
are exact up to `agreement.MOST_EXACT`. The largest vote is a number of steps, and a digest is added
to zeros. Decisions outside of a step use int32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfmulti.distribution import collectives, replica_context
from tfmulti.distribution.strategies import Placement, placement_of
from tfmulti.keras_patches.model_structure import moving_statistics
from tfmulti.training.input.worker_batch import WorkerBatch
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step.step_logs import Logs, Means, StepLogs


class StepResult(NamedTuple):
    """The result of an execution, the same on every worker but for the second of `waits_s`.

    Attributes:
        logs: the logs of the last step, over the data of all replicas.
        epoch_logs: the logs of an epoch that ends with this execution (`StepLogs.final`).
        votes: each vote summed over all replicas. A tensor, and `stop_votes.Votes` once `loops.run`
            has read it.
        digests: the digest of each worker's last batch, by rank.
        rows: the number of examples of all steps of the execution.
        lost: how many examples of the execution could not be read.
        waits_s: the seconds that a replica waited for data on average, and the seconds that this
            worker waited. They are in one tensor, because reading each tensor takes time.
    """

    logs: Logs
    epoch_logs: Logs
    votes: Any
    digests: tf.Tensor
    rows: tf.Tensor
    lost: tf.Tensor
    waits_s: tf.Tensor


class Totals(NamedTuple):
    """The totals of what the steps of an execution took from their source, on this worker.

    Attributes:
        rows: the rows of each local replica that count, and last those of all replicas.
        lost: how many examples could not be read.
        waited_s: the seconds that the steps waited for data.
        free_since: the time at which the last step ended, since when the next one waits.
    """

    rows: tuple[tf.Tensor, ...]
    lost: tf.Tensor
    waited_s: tf.Tensor
    free_since: tf.Tensor

    @classmethod
    def nothing(cls, placement: Placement) -> Totals:
        """Returns the totals before the first step, which waits from this time on."""
        rows = tuple(tf.constant(0, tf.int64) for _ in range(placement.local_replicas + 1))
        return cls(rows, tf.constant(0, tf.int64), tf.constant(0, tf.float64), now())

    def counted(self, batch: WorkerBatch) -> Totals:
        """Returns the totals with the rows of one more step."""
        more = (*batch.own_rows, batch.rows)
        rows = tuple(a + b for a, b in zip(self.rows, more, strict=True))
        return self._replace(rows=rows, lost=self.lost + batch.lost)

    def waited_for(self, arrival: tf.Tensor) -> Totals:
        """Returns the totals with the time that a step waited for data until its arrival."""
        return self._replace(waited_s=self.waited_s + tf.maximum(arrival - self.free_since, 0))

    def after(self, logs: Any) -> Totals:
        """Returns the totals after a step, which has ended when its logs are there."""
        # If TensorFlow takes the next step's data while this step runs, no step waits. On a GPU a
        # step has ended when its results can be copied to the host.
        with tf.device("CPU:0"):
            done = [tf.identity(log) for log in tf.nest.flatten(logs, expand_composites=True)]
        with tf.control_dependencies(done):
            return self._replace(free_since=now())


def now() -> tf.Tensor:
    """Returns the time in seconds, or 0 under op determinism, where TensorFlow has no clock."""
    # The call in `init_scope` runs at once, even while a step is traced.
    with tf.init_scope():
        try:
            tf.timestamp()
        except tf.errors.FailedPreconditionError:
            return tf.constant(0, tf.float64)
    return tf.timestamp()


def time_of(batch: WorkerBatch) -> tf.Tensor:
    """Returns the time in seconds at which a batch has arrived."""
    leaves = tf.nest.flatten(batch.data[0], expand_composites=True)
    data = [leaf for leaf in leaves if leaf is not None][:1]
    # The number of rows may be known before the batch arrives.
    with tf.control_dependencies([batch.rows, *data]):
        return now()


class Statistics:
    """The moving statistics of a model's layers, averaged over the replicas by their rows.

    Each replica r updates its own statistics from its n_r of the n rows of an execution. At the end
    of the execution all replicas get the same statistics:

        statistics = statistics before + Σ_r (n_r / n) · change_r

    So every evaluation and every checkpoint sees the average. If all replicas give each of these
    variables the same value, they stay as they are, since a large change, such as one from
    infinity, would lose its digits in the sum.
    """

    def __init__(self, model: keras.Model) -> None:
        sync = state_of(model).options.sync_batch_norm
        several = placement_of(model.distribute_strategy).replicas > 1
        self._variables = moving_statistics(model, sync_batch_norm=sync) if several else []
        self._equal_on_replicas = state_of(model).traced.equal_on_replicas
        self._strategy = model.distribute_strategy

    def now(self) -> Any:
        """Returns the current values on each replica. Call it in cross-replica context."""
        return self._strategy.run(lambda: [tf.identity(v.value) for v in self._variables])

    def changes(self, before: list[tf.Tensor], weight: tf.Tensor) -> list[tf.Tensor]:
        """Returns the changes of this replica's statistics since `before`, times its weight."""
        return [
            tf.math.multiply_no_nan(tf.convert_to_tensor(v.value) - old, tf.cast(weight, old.dtype))
            for v, old in zip(self._variables, before, strict=True)
        ]

    def set(self, before: list[tf.Tensor], changes: list[tf.Tensor]) -> None:
        """Sets this replica's statistics to those before the steps plus the summed changes.

        Call it after the step was traced.
        """
        # One of them may follow another one, such as an average of statistics that differ.
        equal = [self._equal_on_replicas.get(id(v), True) for v in self._variables]
        # In eager mode nothing is known.
        if self._equal_on_replicas and all(equal):
            return
        for variable, old, change in zip(self._variables, before, changes, strict=True):
            variable.assign(old + change)


class Summary:
    """Makes the `StepResult` of a model's executions, and gives all replicas the same state.

    Args:
        model: the prepared model.
        logs: the logs of the model's step.
        training: whether the executions train.
    """

    def __init__(self, model: keras.Model, logs: StepLogs, *, training: bool) -> None:
        self._model, self._logs = model, logs
        self._placement = placement_of(model.distribute_strategy)
        self._statistics = Statistics(model) if training else None
        self._traces = training and not model.run_eagerly

    def before(self) -> Any:
        """Returns the moving statistics before the steps, for `after`."""
        return self._statistics.now() if self._statistics else ()

    def after(
        self, batch: WorkerBatch, results: Any, votes: tf.Tensor, before: Any, totals: Totals
    ) -> StepResult:
        """Returns the result of an execution, and gives all replicas the same state.

        Args:
            batch: the batch of the last step.
            results: the logs and the metrics' states of each replica, as the last step gave them.
            votes: this worker's votes.
            before: what `before` returned.
            totals: the totals of all steps of the execution.
        """
        strategy = self._model.distribute_strategy
        if self._traces:
            # This line runs once for each traced function of an execution.
            state_of(self._model).traced.count += 1

        def on_replica(results: Any, before: Any) -> StepResult:
            with collectives.serving("result", self._placement, after=results):
                return self._on_replica(batch, results, votes, totals, before)

        result: StepResult = first_local(strategy, strategy.run(on_replica, args=(results, before)))
        return result

    def _on_replica(
        self,
        batch: WorkerBatch,
        results: Any,
        votes: tf.Tensor,
        totals: Totals,
        before: list[tf.Tensor],
    ) -> StepResult:
        """Does the work of `after` on one replica, in replica context."""
        local = replica_context.local_index(self._placement.local_replicas)
        weight = tf.math.divide_no_nan(
            tf.cast(totals.rows[local], tf.float64), tf.cast(totals.rows[-1], tf.float64)
        )
        changes = self._statistics.changes(before, weight) if self._statistics else []
        result, changes = self._summed(results, batch, votes, totals, changes)
        if self._statistics:
            self._statistics.set(before, changes)
        return result

    def _summed(
        self,
        results: tuple[Means, list[tf.Tensor]],
        batch: WorkerBatch,
        votes: tf.Tensor,
        totals: Totals,
        changes: list[tf.Tensor],
    ) -> tuple[StepResult, list[tf.Tensor]]:
        """Returns the result of all replicas, and `changes` summed over them, by one collective."""
        logs, metrics = results
        placement = self._placement
        local = replica_context.local_index(placement.local_replicas)
        weight = batch.weight(local)
        digests = digest_by_rank(batch, local, placement)
        own_waited_s = waited_s = tf.cast(totals.waited_s, tf.float32)
        lost = tf.cast(totals.lost if local == 0 else 0, tf.float32)
        parts = [_part(value, weight) for value in tf.nest.flatten(logs)]
        final, sums = replica_context.global_metrics(
            replica_context.metric_variables(self._model),
            metrics,
            lambda sums: self._logs.final(tf.nest.pack_sequence_as(logs, sums[: len(parts)])),
            [*parts, votes, digests, lost, waited_s, *changes],
        )
        counted, digests, lost, waited_s = sums[len(parts) : len(parts) + 4]
        waits_s = tf.stack([waited_s / placement.replicas, own_waited_s])
        result = StepResult(*final, counted, digests, totals.rows[-1], lost, waits_s)
        return result, sums[len(parts) + 4 :]


def digest_by_rank(batch: WorkerBatch, local: int, placement: Placement) -> tf.Tensor:
    """Returns this worker's digest at its rank, for a sum over all replicas: float32 `[workers]`.

    Args:
        batch: the batch of this worker.
        local: the index of this replica among those of this worker, of which the first one counts.
        placement: this worker's place among the others.
    """
    digest = tf.cast(batch.digest if local == 0 else 0, tf.float32)
    return tf.one_hot(placement.rank, placement.workers, dtype=digest.dtype) * digest


def _part(value: Any, weight: tf.Tensor) -> tf.Tensor:
    """Returns what a replica's log adds to the mean over replicas by rows."""
    value = value if value.shape.is_fully_defined() else tf.reduce_mean(value)
    value = value if value.dtype == tf.float64 else tf.cast(value, tf.float32)
    return tf.math.multiply_no_nan(value, tf.cast(weight, value.dtype))


def first_local(strategy: tf.distribute.Strategy, values: Any) -> Any:
    """Returns the first local replica's values of a nest of values on all replicas."""
    return tf.nest.map_structure(lambda v: strategy.experimental_local_results(v)[0], values)

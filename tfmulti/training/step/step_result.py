"""The result of an execution, summed over all replicas by one collective.

The collective carries the metrics' states, the workers' votes, a digest of the batch, and the moves
of the moving statistics. So all workers get the same logs, decide alike, and hold the same state
after each execution.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfmulti.distribution import collectives, replica_context
from tfmulti.distribution.strategies import Placement
from tfmulti.keras_patches.model_structure import moving_statistics
from tfmulti.training.input.worker_batch import WorkerBatch
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step.step_logs import Logs, StepLogs


class StepResult(NamedTuple):
    """The result of an execution, the same on every worker but for the second of `waits_s`.

    Attributes:
        logs: the logs of the last step, over the data of all replicas.
        epoch_logs: the logs of an epoch that ends with this execution (`StepLogs.final`).
        votes: each vote of `stop_votes.VOTES`, summed over all replicas. A tensor, and a list of
            floats once `loops.run` has read it.
        digests: the digest of each worker's last batch, by rank.
        rows: the number of examples of all steps of the execution.
        lost: how many examples of the execution could not be read.
        waits_s: the seconds that a replica waited for data on average, and the seconds that this
            worker waited. Both are in one tensor, because each one to read takes time.
    """

    logs: Logs
    epoch_logs: Logs
    votes: Any
    digests: tf.Tensor
    rows: tf.Tensor
    lost: tf.Tensor
    waits_s: tf.Tensor


class Taken(NamedTuple):
    """The totals of what the steps of an execution took from their source, on this worker.

    Attributes:
        rows: the rows of each local replica that count, and last those of all replicas.
        lost: how many examples could not be read.
        waited_s: the seconds that the steps waited for data.
        free_since: the time at which the last step ended. The next one waits from then on.
    """

    rows: tuple[tf.Tensor, ...]
    lost: tf.Tensor
    waited_s: tf.Tensor
    free_since: tf.Tensor

    @classmethod
    def nothing(cls, placement: Placement) -> Taken:
        """Returns the totals before the first step, which waits from this time on."""
        rows = tuple(tf.constant(0, tf.int64) for _ in range(placement.local_replicas + 1))
        return cls(rows, tf.constant(0, tf.int64), tf.constant(0, tf.float64), now())

    def counted(self, shards: WorkerBatch) -> Taken:
        """Returns the totals with the rows of one more step."""
        more = (*shards.own_rows, shards.rows)
        rows = tuple(a + b for a, b in zip(self.rows, more, strict=True))
        return self._replace(rows=rows, lost=self.lost + shards.lost)

    def waited_for(self, came: tf.Tensor) -> Taken:
        """Returns the totals with the time that a step waited for data, which came at `came`."""
        return self._replace(waited_s=self.waited_s + tf.maximum(came - self.free_since, 0))

    def after(self, logs: Any) -> Taken:
        """Returns the totals with the end of a step, whose logs are given."""
        # TensorFlow may take the next step's data while this step runs, which is no waiting. On a
        # GPU a step has ended when its results can be copied to the host.
        with tf.device("CPU:0"):
            done = [tf.identity(t) for t in tf.nest.flatten(logs, expand_composites=True)]
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


def time_of(shards: WorkerBatch) -> tf.Tensor:
    """Returns the time in seconds at which a batch has come."""
    leaves = tf.nest.flatten(shards.data[0], expand_composites=True)
    data = [leaf for leaf in leaves if leaf is not None][:1]
    # The number of rows alone may be known before the batch comes.
    with tf.control_dependencies([shards.rows, *data]):
        return now()


class Statistics:
    """The moving statistics of a model's layers, averaged over the replicas by their rows.

    Each replica updates its own statistics from its own rows. At the end of an execution all get
    the same: the statistics before it, plus the mean of the replicas' moves. So every evaluation
    and every checkpoint sees the average.
    """

    def __init__(self, model: keras.Model, placement: Placement) -> None:
        sync = state_of(model).options.sync_batch_norm
        several = placement.replicas > 1
        self._variables = moving_statistics(model, sync_batch_norm=sync) if several else []
        self._strategy = model.distribute_strategy

    def now(self) -> Any:
        """Returns the current values on each replica. Call it in cross-replica context."""
        return self._strategy.run(lambda: [tf.identity(v.value) for v in self._variables])

    def moved(self, before: list[tf.Tensor], weight: tf.Tensor) -> list[tf.Tensor]:
        """Returns how far this replica's statistics have moved, times its weight.

        Args:
            before: this replica's values from `now`, before the steps.
            weight: this replica's part of the rows of all replicas, float64 scalar.
        """
        return [
            tf.math.multiply_no_nan(tf.convert_to_tensor(v.value) - old, tf.cast(weight, old.dtype))
            for v, old in zip(self._variables, before, strict=True)
        ]

    def set(self, before: list[tf.Tensor], moved: list[tf.Tensor]) -> None:
        """Sets this replica's statistics to those before the steps plus the mean move.

        Args:
            before: this replica's values from `now`, before the steps.
            moved: what `moved` returned, summed over all replicas.
        """
        for variable, old, move in zip(self._variables, before, moved, strict=True):
            variable.assign(old + move)


class Summary:
    """Makes the `StepResult` of a model's executions, and ends them with the same state everywhere.

    Args:
        model: the prepared model.
        placement: this process' place among the workers.
        logs: the logs of the model's step.
        training: whether the executions train.
    """

    def __init__(
        self, model: keras.Model, placement: Placement, logs: StepLogs, *, training: bool
    ) -> None:
        self._model, self._placement, self._logs = model, placement, logs
        self._statistics = Statistics(model, placement) if training else None
        self._traces = training and not model.run_eagerly

    def before(self) -> Any:
        """Returns the moving statistics before the steps, for `after`."""
        return self._statistics.now() if self._statistics else ()

    def after(
        self, shards: WorkerBatch, found: Any, votes: tf.Tensor, before: Any, taken: Taken
    ) -> StepResult:
        """Returns the result of an execution, and gives all replicas the same state.

        Args:
            shards: the batch of the last step.
            found: the logs and the metrics' states of each replica, as the last step returned them.
            votes: this worker's votes.
            before: what `before` returned.
            taken: the totals of all steps of the execution.
        """
        strategy = self._model.distribute_strategy
        if self._traces:
            # This line runs once for each traced function of an execution.
            state_of(self._model).traced.count += 1

        def on_replica(found: Any, before: Any) -> StepResult:
            with collectives.serving("outcome", self._placement):
                return self._on_replica(shards, found, votes, taken, before)

        outcome: StepResult = first_local(strategy, strategy.run(on_replica, args=(found, before)))
        return outcome

    def _on_replica(
        self,
        shards: WorkerBatch,
        found: Any,
        votes: tf.Tensor,
        taken: Taken,
        before: list[tf.Tensor],
    ) -> StepResult:
        """Does the work of `after` on one replica, in replica context."""
        local = replica_context.local_index(self._placement.local_replicas)
        weight = tf.math.divide_no_nan(
            tf.cast(taken.rows[local], tf.float64), tf.cast(taken.rows[-1], tf.float64)
        )
        moved = self._statistics.moved(before, weight) if self._statistics else []
        outcome, moved = self._summed(found, shards, local, votes, taken, moved)
        if self._statistics:
            self._statistics.set(before, moved)
        return outcome

    def _summed(
        self,
        found: tuple[Logs, list[tf.Tensor]],
        shards: WorkerBatch,
        local: int,
        votes: tf.Tensor,
        taken: Taken,
        moved: list[tf.Tensor],
    ) -> tuple[StepResult, list[tf.Tensor]]:
        """Returns the result of all replicas, and `moved` summed over them, by one collective."""
        logs, metrics = found
        weight = shards.weight(local)
        place = self._placement
        digest = tf.cast(shards.digest if local == 0 else 0, tf.float32)
        digests = tf.one_hot(place.rank, place.workers) * digest
        own_waited_s = waited_s = tf.cast(taken.waited_s, tf.float32)
        lost = tf.cast(taken.lost if local == 0 else 0, tf.float32)
        parts = [_part(value, weight) for value in logs.values()]
        final, sums = replica_context.global_metrics(
            replica_context.metric_variables(self._model),
            metrics,
            lambda sums: self._logs.final(dict(zip(logs, sums, strict=False))),
            [*parts, votes, digests, lost, waited_s, *moved],
        )
        counted, digests, lost, waited_s = sums[len(parts) : len(parts) + 4]
        waits_s = tf.stack([waited_s / place.replicas, own_waited_s])
        outcome = StepResult(*final, counted, digests, taken.rows[-1], lost, waits_s)
        return outcome, sums[len(parts) + 4 :]


def _part(value: Any, weight: tf.Tensor) -> tf.Tensor:
    """Returns what a replica's log adds to the mean over replicas by rows."""
    value = value if value.shape.is_fully_defined() else tf.reduce_mean(value)
    value = value if value.dtype == tf.float64 else tf.cast(value, tf.float32)
    return tf.math.multiply_no_nan(value, tf.cast(weight, value.dtype))


def first_local(strategy: tf.distribute.Strategy, values: Any) -> Any:
    """Returns the first local replica's values of a nest of values on all replicas."""
    return tf.nest.map_structure(lambda v: strategy.experimental_local_results(v)[0], values)

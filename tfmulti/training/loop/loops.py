"""The loops inside `fit`, `evaluate` and `predict`, which every worker runs alike.

No worker decides anything here alone. The number of steps, the end of the training and whether to
evaluate follow from values that are the same on all workers. One of these values is the sum of the
workers' votes (`stop_votes`). A worker that decided alone would leave the others waiting in a
collective.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti.config.troubleshooting import documented
from tfmulti.distribution.agreement import gather
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import DataError
from tfmulti.keras_patches.assignments import StatesOfMetrics
from tfmulti.keras_patches.model_structure import IN_FIT, initial_epoch_of, metrics_one_by_one
from tfmulti.keras_patches.patching import is_of_keras
from tfmulti.keras_patches.variables import array_of, tf_variable_of
from tfmulti.launch.heartbeat import heartbeat
from tfmulti.training.checkpoint.resume import CheckpointManager, Progress
from tfmulti.training.input.interface import Feed
from tfmulti.training.loop.data_faults import data_faults_explained, fault_of_any
from tfmulti.training.loop.same_data import check_same_batches
from tfmulti.training.loop.same_weights import check_same_weights
from tfmulti.training.loop.step_clock import StepClock
from tfmulti.training.loop.stop_votes import Votes
from tfmulti.training.state import model_checks
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step.execution import Execution
from tfmulti.training.step.step_result import StepResult
from tfmulti.training.step.steps_per_execution import StepsPerExecution

if TYPE_CHECKING:
    from tfmulti.training.verification.verification import FirstSteps

Logs = dict[str, Any]
_VARIABLES = (keras.Variable, tf.Variable)
# With several thresholds the result of these metrics is their variable.
_COUNTS = (
    *(keras.metrics.TruePositives, keras.metrics.TrueNegatives),
    *(keras.metrics.FalsePositives, keras.metrics.FalseNegatives),
)


@dataclass(frozen=True)
class Training:
    """One call of `fit`: its data, its length, and when it evaluates.

    Attributes:
        feed: the data of the training.
        callbacks: the callbacks that this worker runs.
        initial_epoch: the number of the first epoch, counted from 0.
        epochs: the number of epochs after which the training ends, as in Keras.
        steps_per_epoch: the steps of an epoch; None takes each batch of the data once.
        validation: the data of the validation, or None.
        validation_arguments: the arguments of `evaluate` in a validation, as Keras gives them.
        validation_freq: the number of epochs from one validation to the next, or a list of the
            epochs that end with one, counted from 1.
        manager: makes the checkpoints, or None.
        steps_per_execution: the number of steps of each execution.
        first_steps: compares the first steps with one device, or None.
    """

    feed: Feed
    callbacks: keras.callbacks.CallbackList
    initial_epoch: int
    epochs: int
    steps_per_epoch: int | None
    validation: Feed | None = None
    validation_arguments: Mapping[str, Any] = field(default_factory=dict)
    validation_freq: Any = 1
    manager: CheckpointManager | None = None
    steps_per_execution: StepsPerExecution = field(default_factory=lambda: StepsPerExecution(1))
    first_steps: FirstSteps | None = None

    @property
    def steps(self) -> int | None:
        """The steps of an epoch, or None if only reading tells it."""
        return self.steps_per_epoch or self.feed.data.steps

    def steps_left(self, progress: Progress) -> int:
        """Returns the steps until the end of `fit`, or a number below 1 if it is unknown."""
        return (self.epochs - progress.epoch) * (self.steps or 0) - progress.step

    def has_all_batches(self, progress: Progress) -> bool:
        """Returns whether the iterator in use is known to have all batches left of the epoch."""
        rest = None if self.steps is None else self.steps - progress.step
        return self.feed.data.holds(None if rest is None else progress.batches + rest)

    def ends_pass(self, progress: Progress) -> bool:
        """Returns whether the pass ends here, so that the next epoch begins another."""
        data = self.feed.data
        if data.endless:
            return False
        is_complete = data.steps is not None and progress.batches >= data.steps
        return self.steps_per_epoch is None or is_complete

    def validates(self, epoch: int) -> bool:
        """Returns whether an epoch, counted from 0, ends with a validation."""
        frequency = self.validation_freq
        if self.validation is None:
            return False
        if isinstance(frequency, int):
            return (epoch + 1) % frequency == 0
        return epoch + 1 in frequency


def train(model: keras.Model, training: Training) -> Logs:
    """Runs all epochs, and returns the logs of the last one. Every worker calls it.

    Raises:
        DataError: the data cannot be read, has no batches, or differs between workers.
    """
    callbacks, state, manager = training.callbacks, state_of(model), training.manager
    resumed = manager.start() if manager else None
    progress = resumed or Progress(initial_epoch_of(model, training.initial_epoch))
    logs = dict(progress.logs)
    heartbeat().begin()
    has_trained, clock = False, StepClock()
    has_ended = progress.epoch >= training.epochs
    if manager is not None and resumed and (not progress.step or has_ended):
        manager.restore(has_ended=has_ended)
    while progress.epoch < training.epochs and not progress.is_over:
        if progress.step:
            callbacks.on_epoch_begin(progress.epoch)
            assert manager is not None
            # `on_epoch_begin` was called before the checkpoint, too. What it changes, such as a
            # learning rate, is in the checkpoint already, so the state is restored after it.
            manager.restore()
        else:
            model.reset_metrics()
            callbacks.on_epoch_begin(progress.epoch)
        check_same_weights(model, all_numbers=not has_trained)
        has_trained = True
        has_no_more, stopped = _epoch(model, training, progress, clock)
        logs = dict(progress.logs)
        # Histories hold whole epochs only.
        if state.run.stopped_by is not None:
            break
        is_pass_over = has_no_more or training.ends_pass(progress)
        validates = training.validates(progress.epoch)
        repeated = manager.repeated_if_stopped(progress.batches) if manager and validates else None
        with repeated or contextlib.nullcontext():
            if is_pass_over:
                training.feed.end_pass(complete=not stopped)
            if validates:
                logs |= _validated(model, training)
        if state.run.stopped_by is not None:
            break
        callbacks.on_epoch_end(progress.epoch, logs)
        progress.epoch, progress.step, progress.logs = progress.epoch + 1, 0, logs
        if is_pass_over:
            progress.batches = 0
        votes = votes_of(model, stop=bool(model.stop_training))
        if _stops(model, votes, _summed(model, votes)):
            progress.is_over = state.run.stopped_by is None
            break
        # After the last epoch a checkpoint is made in any case.
        if manager is not None and progress.epoch < training.epochs:
            manager.end_epoch(progress)
    if manager is not None and has_trained:
        manager.save(progress, wait=True)
    training.feed.end_pass()
    return logs


def _validated(model: keras.Model, training: Training) -> Logs:
    """Returns the logs of a validation, with `val_` before their names."""
    state = state_of(model)
    _warn_of_variables_as_logs(model)
    state.validation = training.validation
    try:
        logs = model.evaluate(
            **training.validation_arguments,
            callbacks=training.callbacks,
            return_dict=True,
            **{IN_FIT: True},
        )
    finally:
        state.validation = None
    return {f"val_{name}": value for name, value in logs.items()}


def _warn_of_variables_as_logs(model: keras.Model) -> None:
    """Warns once of a metric whose result is a variable, which plain Keras reads too late.

    Every worker calls it, because a result may be computed from the variables of all replicas.
    """
    told = state_of(model).told
    if "variables as logs" in told:
        return
    told.add("variables as logs")
    metrics = [
        metric
        for metric in metrics_one_by_one(model)
        if isinstance(metric, _COUNTS) or not is_of_keras(type(metric))
    ]
    variables = [m.name for m in metrics if any(isinstance(v, _VARIABLES) for v in _results_of(m))]
    if variables and placement_of(model.distribute_strategy).is_chief:
        warnings.warn(
            f"the result of the metric {variables[0]!r} is its variable. Plain Keras reads it "
            "after the validation, and logs the value of the validation for the training, too. "
            "tfmulti logs the value of the training. Return variable + 0 from result().",
            stacklevel=2,
        )


def _results_of(metric: keras.metrics.Metric) -> list[Any]:
    """Returns the results of a metric, which may be in a dict."""
    result = metric.result()
    return list(result.values()) if isinstance(result, Mapping) else [result]


def _lost_in_pass(model: keras.Model, feed: Feed, result: StepResult, before: int) -> int:
    """Returns how many examples of a pass could not be read so far, the same on all workers.

    Raises:
        DataError: these are too many, together with those that were lost when the data was loaded.
            If no example may be left out, one is too many.
    """
    reading = state_of(model).reading
    if not reading.skips_bad:
        several = placement_of(model.distribute_strategy).workers > 1
        # With one worker the step fails instead, because it gets no batch.
        if several and int(result.lost):
            raise fault_of_any(model.distribute_strategy, feed)
        return 0
    lost = int(result.lost)
    state_of(model).run.lost += lost
    if lost:
        reading.check_lost(before + lost)
    return before + lost


def _take(feed: Feed, step: int, steps: int | None) -> Any:
    """Does what `Feed.take` does, and tells why the data cannot be read."""
    with data_faults_explained(feed):
        return feed.take(step, steps)


def _epoch(
    model: keras.Model, training: Training, progress: Progress, clock: StepClock
) -> tuple[bool, bool]:
    """Trains the rest of an epoch.

    Returns:
        Whether the data has ended, and whether the votes have stopped the training.
    """
    state, manager = state_of(model), training.manager
    placement = placement_of(model.distribute_strategy)
    clock.begin()
    has_ended = stops = False
    is_long_enough = training.has_all_batches(progress)
    per_execution = training.steps_per_execution if is_long_enough else StepsPerExecution(1)
    data = training.feed.data
    per_pass = data.steps if data.endless and state.reading.skips_bad else None
    earlier = progress.epoch * (training.steps or 0)
    for first, last in _executions(training.steps, per_execution, progress.step, per_pass, earlier):
        if per_pass and (earlier + first) % per_pass == 0:
            progress.lost = 0
        count = last - first + 1
        steps = count if is_long_enough else None
        if training.first_steps is not None:
            training.first_steps.read()
        source = clock.waiting(functools.partial(_take, training.feed, earlier + first, steps))
        if source is None:
            _check_data_was_enough(training.steps, first, state.run.steps)
            has_ended = True
            break
        training.callbacks.on_train_batch_begin(first)
        if training.first_steps is not None:
            training.first_steps.compare()
        votes = votes_of(
            model,
            stop=bool(model.stop_training),
            checkpoint=manager is not None and manager.wants(count),
            steps=_steps_wanted(model, per_execution),
        )
        clock.start()
        if model.train_function is not state.built_function:
            # A callback has compiled the model, and made another function.
            model_checks.build(model, data.specs)
            state.built_function = model.train_function
        with data_faults_explained(training.feed):
            result = run(model, model.train_function, source, count, votes)
        per_execution.agree(result.votes.agreed_steps(placement.local_replicas))
        state.run.steps += count
        state.run.examples += int(result.rows)
        clock.add(result)
        per_execution.add(clock.period_s, clock.inside_s, training.steps_left(progress) - count)
        progress.lost = _lost_in_pass(model, training.feed, result, progress.lost)
        progress.step, progress.batches = last + 1, progress.batches + count
        progress.logs = result.epoch_logs
        heartbeat().step(state.run.steps)
        state.compares = result.votes.comparison > 0
        if state.compares:
            state.wants_comparison = False
            clock.stop(state, training.feed)
        end = functools.partial(training.callbacks.on_train_batch_end, last, result.logs)
        progress.logs = _logs_after(model, progress.logs, end)
        stops = _stops(model, votes_of(model, stop=bool(model.stop_training)), result.votes)
        if manager is not None and result.votes.checkpoint:
            progress.logs = as_floats(progress.logs)
            manager.save(progress)
        if stops:
            model.stop_training = True
            break
    progress.logs = _logs_of_epoch(model, progress.logs)
    clock.stop(state, training.feed)
    return has_ended, stops


def _logs_after(model: keras.Model, logs: Logs, call: Callable[[], None]) -> Logs:
    """Calls the callbacks at the end of a batch, and returns the logs of the epoch so far.

    Plain Keras logs the results of the metrics at the end of the epoch, and a callback may change
    the metrics. On several workers the changes of the model's methods are followed. Those of a
    metric's `update_state` are not, because a callback may run on one worker alone.
    """
    state = state_of(model)
    state.metric_results = None
    StatesOfMetrics.changed.clear()
    call()
    # The search for the metrics of all layers takes time, and few callbacks change a metric.
    has_changed = bool(StatesOfMetrics.changed) and any(
        id(tf_variable_of(variable)) in StatesOfMetrics.changed
        for variable in model.metrics_variables
    )
    results = state.metric_results
    if has_changed and results is None:
        if placement_of(model.distribute_strategy).workers == 1:
            results = model.get_metrics_result
        else:
            _warn_of_changed_metrics(model)
    changed: Logs = results() if results is not None else {}
    return changed if changed.keys() == logs.keys() else logs


def _warn_of_changed_metrics(model: keras.Model) -> None:
    """Warns once that a callback changes the metrics of a model on several workers."""
    told = state_of(model).told
    if "changed metrics" not in told:
        told.add("changed metrics")
        warnings.warn(
            "a callback changes a metric of the model at the end of a batch. On several workers "
            "the logs of an epoch leave out such a change after the last batch. Update the metric "
            "in the step, or add the value to the logs in on_epoch_end: logs['name'] = value.",
            stacklevel=2,
        )


def _logs_of_epoch(model: keras.Model, logs: Logs) -> Logs:
    """Returns the logs at the end of an epoch, or of an evaluation, as numbers.

    As in plain Keras, a `get_metrics_result` of the user's own is called once more. It may read a
    variable that a callback has changed. Every worker calls it.
    """
    if not is_of_keras(type(model).get_metrics_result):
        results = model.get_metrics_result()
        logs = results if results.keys() == logs.keys() else logs
    return as_floats(logs)


def evaluate(
    model: keras.Model, feed: Feed, count: int | None, callbacks: keras.callbacks.CallbackList
) -> Logs:
    """Returns loss and metrics over the first `count` batches of a feed, or over all for None.

    Every worker calls it.

    Raises:
        DataError: the data cannot be read, has no batches, or differs between workers.
    """
    model.stop_evaluating = False
    callbacks.on_test_begin()
    model.reset_metrics()
    logs: Logs = {}
    is_long_enough, batches, lost = feed.data.holds(count), 0, 0
    stops = False
    for first, last in _executions(
        count, StepsPerExecution(model.steps_per_execution if is_long_enough else 1)
    ):
        steps = last - first + 1
        source = _take(feed, first, steps if is_long_enough else None)
        if source is None:
            _check_data_was_enough(count, first, first)
            break
        callbacks.on_test_batch_begin(first)
        votes = votes_of(model, stop=bool(model.stop_evaluating))
        with data_faults_explained(feed):
            result = run(model, model.test_function, source, steps, votes)
        logs, batches = result.epoch_logs, last + 1
        lost = _lost_in_pass(model, feed, result, lost)
        end = functools.partial(callbacks.on_test_batch_end, last, result.logs)
        logs = _logs_after(model, logs, end)
        stops = _stops(model, votes_of(model, stop=bool(model.stop_evaluating)), result.votes)
        if stops:
            break
    feed.end_pass(complete=batches == feed.data.steps and not stops)
    logs = _logs_of_epoch(model, logs)
    state_of(model).metric_results = lambda: logs
    callbacks.on_test_end(logs)
    return logs


def predict(
    model: keras.Model, feed: Feed, count: int | None, callbacks: keras.callbacks.CallbackList
) -> Any:
    """Returns the outputs of the first `count` batches of a feed, or of all for None.

    Every worker calls it, and gets the rows in order.

    Raises:
        DataError: an example cannot be read, the data has no batches, or the workers have read
            different batches.
    """
    model.stop_predicting = False
    callbacks.on_predict_begin()
    batches = []
    several = placement_of(model.distribute_strategy).workers > 1
    is_long_enough = feed.data.holds(count)
    for first, last in _executions(count, StepsPerExecution(1)):
        source = _take(feed, first, 1 if is_long_enough else None)
        if source is None:
            _check_data_was_enough(count, first, first)
            break
        callbacks.on_predict_batch_begin(first)
        with data_faults_explained(feed), heartbeat().working(model.predict_function):
            predicted = model.predict_function(source)
        check_same_batches(predicted.digests)
        if several and int(predicted.lost):
            raise fault_of_any(model.distribute_strategy, feed)
        batches.append(predicted.outputs)
        callbacks.on_predict_batch_end(last, {"outputs": predicted.outputs})
        if model.stop_predicting:
            break
    feed.end_pass(complete=len(batches) == feed.data.steps and not model.stop_predicting)
    callbacks.on_predict_end()
    return tf.nest.map_structure(concatenated, *batches)


def run(
    model: keras.Model, execute: Execution, source: Any, count: int, votes: Votes
) -> StepResult:
    """Runs an execution and returns its result, with `Votes`. Every worker calls it.

    Raises:
        DataError: the workers have read different batches. All workers raise it.
    """
    # While the execution runs, `verify` may set the model to one device in another thread.
    several = placement_of(model.distribute_strategy).workers > 1
    with heartbeat().working(execute):
        result = execute(source, count, votes)
        # Reading the digests waits for the end of the execution.
        digests = result.digests.numpy() if several else [0]
    check_same_batches(digests)
    # The votes are copied from the device only once.
    return result._replace(votes=Votes(*np.asarray(result.votes).astype(int).tolist()))


def votes_of(model: keras.Model, *, stop: bool, checkpoint: bool = False, steps: int = 0) -> Votes:
    """Returns this worker's votes, with the signal that it got."""
    state = state_of(model)
    return Votes(
        requested=int(stop),
        sigint=int(state.interrupted == "SIGINT"),
        sigterm=int(state.interrupted == "SIGTERM"),
        checkpoint=int(checkpoint),
        steps=steps,
        comparison=int(state.wants_comparison),
    )


def as_floats(logs: Logs) -> Logs:
    """Returns logs with numbers as floats and others as arrays. None and texts stay as they are.

    Nested logs stay nested.
    """

    def as_float(value: Any) -> Any:
        if isinstance(value, dict):
            return as_floats(value)
        array = array_of(value)
        # A text comes as a tensor, and with `run_eagerly` as bytes.
        if array.dtype.kind in "OS":
            return value if value is None else array.astype(object)
        return float(array) if array.ndim == 0 else array

    return {name: as_float(value) for name, value in logs.items()}


def concatenated(*parts: Any) -> Any:
    """Returns the rows of all parts together, as an array if they are dense.

    Dense parts whose other sizes differ make a ragged tensor, as with plain Keras.
    """
    dense = all(isinstance(part, tf.Tensor) for part in parts)
    if dense and len({part.shape.rank for part in parts}) == 1:
        sizes = zip(*(part.shape[1:] for part in parts), strict=True)
        ragged = [axis for axis, found in enumerate(sizes, start=1) if len(set(found)) > 1]
        if ragged:
            parts = tuple(tf.RaggedTensor.from_tensor(p, ragged_rank=ragged[-1]) for p in parts)
    joined = tf.concat(parts, axis=0) if len(parts) > 1 else parts[0]
    return joined.numpy() if isinstance(joined, tf.Tensor) else joined


def _executions(
    count: int | None,
    per_execution: StepsPerExecution,
    start: int = 0,
    per_pass: int | None = None,
    earlier: int = 0,
) -> Iterator[tuple[int, int]]:
    """Yields the first and the last step of each execution of an epoch, from a step on.

    If the number of steps is unknown, each execution is one step, because the data may end after
    any step. No execution goes beyond the end of a pass of `per_pass` steps. So the examples that
    it lost belong to one pass. `earlier` is the number of steps in the earlier epochs.

    >>> list(_executions(8, StepsPerExecution(4), 0, per_pass=5, earlier=8))
    [(0, 1), (2, 5), (6, 6), (7, 7)]
    """
    if count is None:
        yield from ((step, step) for step in itertools.count(start))
        return
    while start < count:
        end = min(start + per_execution.at_once, count)
        if per_pass:
            end = min(end, start + per_pass - (earlier + start) % per_pass)
        first, start = start, end
        yield first, end - 1


def _steps_wanted(model: keras.Model, per_execution: StepsPerExecution) -> int:
    """Returns the steps that this worker wants for each execution; only the chief wants any.

    Steps that gather rows run one by one (`Execution`), so more of them would gain nothing.
    """
    is_chief = placement_of(model.distribute_strategy).is_chief
    gathers = "train_step" in state_of(model).traced.gathers
    return per_execution.wish if is_chief and not gathers else 0


def _summed(model: keras.Model, votes: Votes) -> Votes:
    """Returns each vote summed over all workers, for decisions outside of an execution."""
    of_workers = gather(model.distribute_strategy, votes)
    return Votes(*map(sum, zip(*of_workers, strict=True)))


def _stops(model: keras.Model, votes: Votes, summed: Votes) -> bool:
    """Returns whether to stop now, the same on all workers at the same step.

    A single worker follows its present votes. Several workers follow the summed votes.
    """
    is_single = placement_of(model.distribute_strategy).workers == 1
    reason = (votes if is_single else summed).reason_to_stop()
    if reason in ("SIGINT", "SIGTERM"):
        state_of(model).run.stopped_by = reason
        model.stop_training = True
    return reason is not None


def _check_data_was_enough(count: int | None, steps: int, steps_of_run: int) -> None:
    """Warns if the data ended after `steps` of `count` steps; raises DataError if it had none."""
    if steps_of_run == 0:
        raise DataError("the data has no batches. Give a Dataset that yields at least one.")
    if count is not None:
        warnings.warn(
            documented(
                f"the data ended after {steps} of {count} steps. "
                "Use Dataset.repeat(), or ask for fewer steps."
            ),
            stacklevel=4,
        )

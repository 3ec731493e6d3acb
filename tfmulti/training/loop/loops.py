"""The loops inside `fit`, `evaluate` and `predict`, which every worker runs alike.

No worker decides anything here alone. The number of steps, the end of the training and whether to
evaluate follow from values that are the same on all workers. One of these values is the sum of the
workers' votes (`stop_votes`). A worker that decided alone would leave the others waiting in a
collective.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti.config.console import speaker
from tfmulti.distribution.agreement import gather, gather_bytes
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import DataError
from tfmulti.keras_patches.model_structure import initial_epoch_of
from tfmulti.keras_patches.random_numbers import global_seed
from tfmulti.launch.heartbeat import heartbeat
from tfmulti.training.checkpoint.resume import CheckpointManager, Progress
from tfmulti.training.input.dataset_feed import PyDatasetFeed
from tfmulti.training.input.interface import Feed
from tfmulti.training.input.shuffle import Shuffle
from tfmulti.training.loop import stop_votes
from tfmulti.training.loop.data_faults import found_by_any, told_by
from tfmulti.training.loop.step_clock import StepClock
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step.execution import Execution
from tfmulti.training.step.step_result import StepResult
from tfmulti.training.step.steps_per_execution import StepsPerExecution

Logs = dict[str, Any]


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
        validation_steps: the steps of a validation; None takes each batch once.
        validation_freq: the number of epochs from one validation to the next, or a list of the
            epochs that end with one, counted from 1.
        keeper: makes the checkpoints, or None.
        pace: the number of steps of each execution.
    """

    feed: Feed
    callbacks: keras.callbacks.CallbackList
    initial_epoch: int
    epochs: int
    steps_per_epoch: int | None
    validation: Feed | None = None
    validation_steps: int | None = None
    validation_freq: Any = 1
    keeper: CheckpointManager | None = None
    pace: StepsPerExecution = field(default_factory=lambda: StepsPerExecution(1))

    @property
    def steps(self) -> int | None:
        """The steps of an epoch, or None if only reading tells it."""
        return self.steps_per_epoch or self.feed.data.steps

    @property
    def steps_per_pass(self) -> int | None:
        """The steps of one pass if the iterator goes on over all epochs, or None."""
        return self.feed.data.steps if self.feed.data.endless else None

    def is_over(self, at: Progress) -> bool:
        """Returns whether the next epoch begins a new pass of the data.

        Args:
            at: the position at the end of an epoch.
        """
        data = self.feed.data
        if data.endless:
            return False
        whole = data.steps is not None and at.batches >= data.steps
        return self.steps_per_epoch is None or whole

    def validates(self, epoch: int) -> bool:
        """Returns whether an epoch ends with a validation.

        Args:
            epoch: the number of the epoch, counted from 0.
        """
        frequency = self.validation_freq
        if self.validation is None:
            return False
        if isinstance(frequency, int):
            return (epoch + 1) % frequency == 0
        return epoch + 1 in frequency


def train(model: keras.Model, training: Training) -> Logs:
    """Runs all epochs, and returns the logs of the last one. Every worker calls it.

    Args:
        model: the prepared, compiled and built model.
        training: the call of `fit`.

    Raises:
        DataError: the data cannot be read, has no batches, or differs between workers.
    """
    callbacks, state, keeper = training.callbacks, state_of(model), training.keeper
    resumed = keeper.start() if keeper else None
    at = resumed or Progress(initial_epoch_of(model, training.initial_epoch))
    logs, is_open = dict(at.logs), False
    heartbeat().begin()
    trained, clock = False, StepClock()
    has_ended = at.epoch >= training.epochs
    if keeper is not None and resumed and (not at.step or has_ended):
        keeper.restore(has_ended=has_ended)
    while at.epoch < training.epochs and not at.is_over:
        if at.step:
            callbacks.on_epoch_begin(at.epoch)
            assert keeper is not None
            # `on_epoch_begin` was called before the checkpoint, too. What it changes, such as a
            # learning rate, is in the checkpoint already, so the state is restored after it.
            keeper.restore()
        else:
            model.reset_metrics()
            callbacks.on_epoch_begin(at.epoch)
        if not is_open:
            training.feed.begin_pass(_first_step(training, at), at.batches)
            is_open = at.goes_on = True
        if keeper is not None and resumed:
            # Reading the data again may have drawn random numbers, so this comes last.
            keeper.restore_random_states()
        resumed, trained = None, True
        ended, stopped = _epoch(model, training, at, clock)
        logs = dict(at.logs)
        # Histories hold whole epochs only.
        if state.run.stopped_by is not None:
            break
        over = ended or training.is_over(at)
        validates = training.validates(at.epoch)
        again = keeper.again_if_stopped(at.batches) if keeper and validates else None
        with again or contextlib.nullcontext():
            if over:
                training.feed.end_pass(whole=not stopped)
                is_open = False
            else:
                training.feed.end_epoch()
            if validates:
                logs |= _validated(model, training)
        if state.run.stopped_by is not None:
            break
        callbacks.on_epoch_end(at.epoch, logs)
        at.epoch, at.step, at.logs = at.epoch + 1, 0, logs
        if over:
            at.goes_on, at.batches = False, 0
        wish = bool(model.stop_training)
        if _stops(model, wish, _votes_of_all(model, wish)):
            at.is_over = state.run.stopped_by is None
            break
        # After the last epoch a checkpoint is made in any case.
        if keeper is not None and at.epoch < training.epochs:
            keeper.end_epoch(at)
    if keeper is not None and trained:
        keeper.keep(at, wait=True)
    if is_open:
        training.feed.end_pass()
    return logs


def _is_whole(feed: Feed, batches: int) -> bool:
    """Returns whether a number of batches is known to be a whole pass."""
    return feed.data.steps is not None and batches == feed.data.steps


def _validated(model: keras.Model, training: Training) -> Logs:
    """Returns the logs of a validation, with `val_` before their names."""
    found = model.evaluate(
        training.validation,
        steps=training.validation_steps,
        callbacks=training.callbacks,
        return_dict=True,
    )
    return {f"val_{name}": value for name, value in found.items()}


def _is_sure(feed: Feed, count: int | None, at: Progress) -> bool:
    """Returns whether the iterator in use is known to have all batches left of the epoch."""
    return feed.data.holds(None if count is None else at.batches + count - at.step)


def _lost(model: keras.Model, feed: Feed, outcome: StepResult, before: int) -> int:
    """Returns how many examples of a pass could not be read so far, alike on all workers.

    Raises:
        DataError: these are too many, together with those that were lost when the data was loaded.
            If no example may be left out, one is too many.
    """
    reading = state_of(model).reading
    if not reading.skips_bad:
        several = placement_of(model.distribute_strategy).workers > 1
        # With one worker the step fails instead, because it gets no batch.
        if several and int(outcome.lost):
            raise found_by_any(model.distribute_strategy, feed)
        return 0
    now = int(outcome.lost)
    state_of(model).run.lost += now
    lost = before + now
    if now:
        reading.check_lost(lost)
    return lost


def _source(feed: Feed, steps: int | None) -> Any:
    """Returns what the next execution takes from, or None at the end of the data.

    That is the queue or iterator of the feed for a known number of steps, and one batch otherwise.
    """
    with told_by(feed):
        return next(feed, None) if steps is None else feed.source(steps)


def _steps_left(training: Training, at: Progress) -> int:
    """Returns the steps until the end of `fit`, or a number below 1 if it is unknown."""
    return (training.epochs - at.epoch) * (training.steps or 0) - at.step


def _first_step(training: Training, at: Progress) -> int:
    """Returns the next step, counted over all epochs."""
    return at.epoch * (training.steps or 0) + at.step


def _epoch(
    model: keras.Model, training: Training, at: Progress, clock: StepClock
) -> tuple[bool, bool]:
    """Trains the rest of an epoch.

    Returns:
        Whether the data has ended, and whether the votes have stopped the training.
    """
    state, keeper = state_of(model), training.keeper
    clock.begin()
    stops = False
    sure = _is_sure(training.feed, training.steps, at)
    pace = training.pace if sure else StepsPerExecution(1)
    per_pass = training.steps_per_pass if state.reading.skips_bad else None
    before = _first_step(training, at) - at.step
    for first, last in _executions(training.steps, pace, at.step, per_pass, before):
        if per_pass and (before + first) % per_pass == 0:
            at.lost = 0
        count = last - first + 1
        take = functools.partial(_source, training.feed, count if sure else None)
        source = clock.waiting(take)
        if source is None:
            _check_data_was_enough(training.steps, first, state.run.steps)
            at.logs = as_floats(at.logs)
            clock.stop(state, training.feed)
            return True, False
        training.callbacks.on_train_batch_begin(first)
        wish = bool(model.stop_training)
        due = keeper is not None and keeper.wants(count)
        clock.start()
        with told_by(training.feed):
            outcome = run(model, model.train_function, source, count, Wishes(wish, due, pace))
        state.run.steps += count
        state.run.examples += int(outcome.rows)
        clock.add(outcome)
        pace.add(clock.period_s, clock.inside_s, _steps_left(training, at) - count)
        at.lost = _lost(model, training.feed, outcome, at.lost)
        at.step, at.batches, at.logs = last + 1, at.batches + count, outcome.epoch_logs
        heartbeat().step(state.run.steps)
        state.compares = stop_votes.compares(outcome.votes)
        if state.compares:
            state.wants_comparison = False
            clock.stop(state, training.feed)
        training.callbacks.on_train_batch_end(last, outcome.logs)
        stops = _stops(model, bool(model.stop_training), outcome.votes)
        if keeper is not None and stop_votes.wants_checkpoint(outcome.votes):
            at.logs = as_floats(at.logs)
            keeper.keep(at)
        if stops:
            model.stop_training = True
            break
    at.logs = as_floats(at.logs)
    clock.stop(state, training.feed)
    return False, stops


def evaluate(
    model: keras.Model, feed: Feed, count: int | None, callbacks: keras.callbacks.CallbackList
) -> Logs:
    """Returns loss and metrics over the first batches of a feed. Every worker calls it.

    Args:
        model: the prepared, compiled and built model.
        feed: the data.
        count: the number of batches; None for all.
        callbacks: the callbacks that this worker runs.

    Raises:
        DataError: the data cannot be read, has no batches, or differs between workers.
    """
    model.stop_evaluating = False
    callbacks.on_test_begin()
    model.reset_metrics()
    logs: Logs = {}
    feed.begin_pass()
    sure, taken, lost = feed.data.holds(count), 0, 0
    stops = False
    for first, last in _executions(
        count, StepsPerExecution(model.steps_per_execution if sure else 1)
    ):
        steps = last - first + 1
        source = _source(feed, steps if sure else None)
        if source is None:
            _check_data_was_enough(count, first, first)
            break
        callbacks.on_test_batch_begin(first)
        wish = bool(model.stop_evaluating)
        with told_by(feed):
            outcome = run(model, model.test_function, source, steps, Wishes(wish))
        logs, taken = outcome.epoch_logs, last + 1
        lost = _lost(model, feed, outcome, lost)
        callbacks.on_test_batch_end(last, outcome.logs)
        stops = _stops(model, bool(model.stop_evaluating), outcome.votes)
        if stops:
            break
    feed.end_pass(whole=_is_whole(feed, taken) and not stops)
    logs = as_floats(logs)
    callbacks.on_test_end(logs)
    return logs


def predict(
    model: keras.Model, feed: Feed, count: int | None, callbacks: keras.callbacks.CallbackList
) -> Any:
    """Returns the outputs of the first batches of a feed, rows in order. Every worker calls it.

    Args:
        model: the prepared model.
        feed: the data.
        count: the number of batches; None for all.
        callbacks: the callbacks that this worker runs.

    Raises:
        DataError: an example cannot be read, or the data has no batches.
    """
    model.stop_predicting = False
    callbacks.on_predict_begin()
    batches = []
    several = placement_of(model.distribute_strategy).workers > 1
    feed.begin_pass()
    sure = feed.data.holds(count)
    for first, last in _executions(count, StepsPerExecution(1)):
        source = _source(feed, 1 if sure else None)
        if source is None:
            _check_data_was_enough(count, first, first)
            break
        callbacks.on_predict_batch_begin(first)
        with told_by(feed):
            found = model.predict_function(source)
        if several and int(found.lost):
            raise found_by_any(model.distribute_strategy, feed)
        batches.append(found.outputs)
        callbacks.on_predict_batch_end(last, {"outputs": found.outputs})
        if model.stop_predicting:
            break
    feed.end_pass(whole=_is_whole(feed, len(batches)) and not model.stop_predicting)
    callbacks.on_predict_end()
    return tf.nest.map_structure(concatenated, *batches)


@dataclass(frozen=True)
class Wishes:
    """What a worker votes for with an execution.

    Args:
        stop: whether it wants to stop.
        checkpoint: whether it wants a checkpoint after the execution.
        pace: takes the number of steps of the next execution, on which all workers agree.
    """

    stop: bool
    checkpoint: bool = False
    pace: StepsPerExecution | None = None


def run(
    model: keras.Model,
    execute: Execution,
    source: Any,
    count: int,
    wishes: Wishes,
) -> StepResult:
    """Runs an execution and returns its result. Every worker calls it.

    Args:
        model: the prepared model.
        execute: the compiled function.
        source: what the execution takes its batches from.
        count: the number of its steps.
        wishes: what this worker votes for.

    Raises:
        DataError: the workers have read different batches. All workers raise it.
    """
    with heartbeat().working(execute):
        place = placement_of(model.distribute_strategy)
        steps_wanted = 0
        # Steps that gather rows run one by one (`Execution`), so several steps in an execution
        # would gain nothing.
        pace = wishes.pace
        if pace is not None and place.is_chief and not state_of(model).traced.gathers:
            steps_wanted = pace.wish
        votes = _votes(model, wishes.stop, wishes.checkpoint, steps_wanted)
        outcome = execute(source, count, votes)
        # Reading the digests waits for the end of the execution.
        digests = outcome.digests.numpy() if place.workers > 1 else [0]
    # The votes are read from the device once, for all who use them below.
    outcome = outcome._replace(votes=np.asarray(outcome.votes).tolist())
    if pace is not None:
        pace.agree(stop_votes.agreed_pace(outcome.votes, place.local_replicas))
    if any(digest != digests[0] for digest in digests):
        raise DataError(
            "the workers read different batches: the data is shuffled without a seed, or is not "
            "the same on all workers. Give shuffle(seed=...), or pass arrays, which tfmulti "
            "shuffles alike everywhere."
        )
    return outcome


def as_floats(logs: Logs) -> Logs:
    """Returns logs with scalars as floats and arrays as lists.

    Args:
        logs: logs with tensors, arrays or numbers.
    """
    arrays = {name: np.asarray(value) for name, value in logs.items()}
    return {name: float(a) if a.ndim == 0 else a.tolist() for name, a in arrays.items()}


def concatenated(*parts: Any) -> Any:
    """Returns the rows of all parts together, as an array if they are dense.

    Args:
        *parts: tensors, dense or ragged, with the rows on the first axis.
    """
    joined = tf.concat(parts, axis=0) if len(parts) > 1 else parts[0]
    return joined.numpy() if isinstance(joined, tf.Tensor) else joined


def draw_shuffle(model: keras.Model, kind: bool | str) -> Shuffle:
    """Returns the seeds of the data order, the same on all workers. Every worker calls it.

    The seed is the one that `prepare` was given. Without one, arrays have the order that plain
    Keras has by the chief's seed of TensorFlow. Other data, and arrays without such a seed, have an
    order that follows from the state of the chief's global NumPy generator and from how
    many seeds the model has drawn. The generator keeps its state.

    Args:
        model: the prepared model.
        kind: the argument `shuffle` of `fit`.
    """
    state = state_of(model)
    if state.options.seed is not None:
        return Shuffle(state.options.seed)
    state.seeds_drawn += 1
    generator = np.random.RandomState()
    generator.set_state(np.random.get_state())
    drawn = int(generator.randint(2**20, size=state.seeds_drawn)[-1])
    seed = global_seed()
    # The first worker is the chief.
    told = gather(model.distribute_strategy, [drawn, seed is not None, seed or 0])[0]
    return Shuffle(told[0], told[2] if told[1] else None, kind == "batch")


def tell_order(model: keras.Model, feed: Feed, shuffle: Shuffle | None) -> None:
    """Prints once, on the chief, that a PyDataset is not read in the order of plain Keras.

    Args:
        model: the prepared model.
        feed: the training data.
        shuffle: the seeds of its order; None without a shuffle.
    """
    state = state_of(model)
    if shuffle is None or not isinstance(feed, PyDatasetFeed) or state.has_told_order:
        return
    state.has_told_order = True
    speaker(placement_of(model.distribute_strategy).is_chief)(
        "order",
        f"the PyDataset's batches have an order of tfmulti's own (seed {shuffle.seed}), not that "
        "of plain Keras; fit(shuffle=False) keeps the order of the batches",
    )


def check_same_data(model: keras.Model, *feeds: Feed | None) -> None:
    """Raises an error if the workers have different data. Every worker calls it.

    Args:
        model: the prepared model.
        *feeds: the feeds; None stands for a feed that there is not.

    Raises:
        DataError: the workers have different data. All workers raise it.
    """
    told = str([(type(feed).__name__, feed.data.digest()) if feed else None for feed in feeds])
    of_all = gather_bytes(model.distribute_strategy, hashlib.sha256(told.encode()).digest())
    if any(each != of_all[0] for each in of_all):
        raise DataError(
            "the workers have different data: another kind of it, another number of examples, "
            "other shapes, labels or values. Give all workers the same files."
        )


def _executions(
    count: int | None,
    pace: StepsPerExecution,
    start: int = 0,
    per_pass: int | None = None,
    before: int = 0,
) -> Iterator[tuple[int, int]]:
    """Yields the first and the last step of each execution of an epoch, from a step on.

    If the number of steps is unknown, each execution is one step, because the data may end after
    any step. No execution goes beyond the end of a pass of `per_pass` steps. So the examples that
    it lost belong to one pass. `before` is the number of steps in the epochs before.

    >>> list(_executions(8, StepsPerExecution(4), 0, per_pass=5, before=8))
    [(0, 1), (2, 5), (6, 6), (7, 7)]
    """
    if count is None:
        yield from ((step, step) for step in itertools.count(start))
        return
    while start < count:
        end = min(start + pace.at_once, count)
        if per_pass:
            end = min(end, start + per_pass - (before + start) % per_pass)
        first, start = start, end
        yield first, end - 1


def _votes(
    model: keras.Model, wish: bool, checkpoint: bool = False, steps_wanted: int = 0
) -> list[float]:
    """Returns this worker's votes, with the signal that it got."""
    state = state_of(model)
    return stop_votes.votes(
        wish,
        state.interrupted,
        wants_checkpoint=checkpoint,
        pace=steps_wanted,
        wants_comparison=state.wants_comparison,
    )


def _votes_of_all(model: keras.Model, wish: bool) -> list[int]:
    """Returns each vote summed over all workers, for decisions outside of an execution."""
    of_each = gather(model.distribute_strategy, [int(vote) for vote in _votes(model, wish)])
    return [sum(votes) for votes in zip(*of_each, strict=True)]


def _stops(model: keras.Model, wish: bool, counted: Any) -> bool:
    """Returns whether to stop here, alike on all workers at the same step.

    With one worker its wish counts at once. With several workers only the counted votes decide, so
    a wish counts when it has travelled with an execution.
    """
    alone = placement_of(model.distribute_strategy).workers == 1
    reason = stop_votes.verdict(_votes(model, wish) if alone else counted)
    if reason in ("SIGINT", "SIGTERM"):
        state_of(model).run.stopped_by = reason
        model.stop_training = True
    return reason is not None


def _check_data_was_enough(count: int | None, seen: int, ever: int) -> None:
    """Warns if the data ended after `seen` of `count` steps; raises DataError if it had none."""
    if ever == 0:
        raise DataError("the data has no batches. Give a Dataset that yields at least one.")
    if count is not None:
        warnings.warn(
            f"the data ended after {seen} of {count} steps. "
            "Use Dataset.repeat(), or ask for fewer steps.",
            stacklevel=4,
        )

"""The loops inside `fit`, `evaluate` and `predict`, run alike by every worker.

No decision here is one worker's own: how many steps, when to stop and whether to evaluate
follow from values that are the same everywhere (the votes of `stopping` among them).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti.config.reading import ReadOptions
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import DataError
from tfmulti.keras_patches.model_structure import initial_epoch_of
from tfmulti.launch.heartbeat import heartbeat
from tfmulti.training.checkpoint.resume import CheckpointManager, Progress
from tfmulti.training.input.feed import Feed
from tfmulti.training.loop.data_faults import found_by_any, told_by
from tfmulti.training.loop.step_clock import StepClock
from tfmulti.training.state import trainer_state
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step import local_steps
from tfmulti.training.step.execution import Execution
from tfmulti.training.step.step_result import StepResult
from tfmulti.training.step.steps_per_execution import StepsPerExecution
from tfmulti.training.step.votes import gather, make_vote

Logs = dict[str, Any]


@dataclass(frozen=True)
class Training:
    """One call of `fit`: the data, how long, and what is evaluated when.

    `epochs` is the last epoch's number, as in Keras; `steps_per_epoch` None takes each batch
    of the data once.
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
        """The steps of an epoch, or None where only reading tells."""
        return self.steps_per_epoch or self.feed.steps

    @property
    def steps_per_pass(self) -> int | None:
        """The steps after which an iterator begins the data anew, where it does so by itself."""
        return self.feed.steps if self.feed.endless else None

    def is_over(self, at: Progress) -> bool:
        """Whether the next epoch starts the data anew, instead of going on in the same pass."""
        if self.feed.endless:
            return False
        whole = self.feed.steps is not None and at.batches >= self.feed.steps
        return self.steps_per_epoch is None or whole

    def validates(self, epoch: int) -> bool:
        frequency = self.validation_freq
        if self.validation is None:
            return False
        if isinstance(frequency, int):
            return (epoch + 1) % frequency == 0
        return epoch + 1 in frequency


def train(model: keras.Model, training: Training) -> Logs:
    """Runs the epochs and returns the last one's logs."""
    several = placement_of(model.distribute_strategy).workers > 1
    vote = make_vote(model.distribute_strategy) if several else None
    callbacks, state, keeper = training.callbacks, state_of(model), training.keeper
    resumed = keeper.start() if keeper else None
    at = resumed or Progress(initial_epoch_of(model, training.initial_epoch))
    logs, iterator = dict(at.logs), None
    heartbeat().begin()
    trained, clock = False, StepClock()
    if keeper is not None and resumed and (not at.step or at.epoch >= training.epochs):
        keeper.restore()
    while at.epoch < training.epochs and not at.is_over:
        if at.step:
            callbacks.on_epoch_begin(at.epoch)
            assert keeper is not None
            keeper.restore()  # after it, since what it changes is in the checkpoint already
        else:
            model.reset_metrics()
            callbacks.on_epoch_begin(at.epoch)
        if iterator is None:
            iterator = training.feed.iterate(_first_step(training, at), at.batches)
            at.goes_on = True
        if keeper is not None and resumed:
            keeper.restore_random_states()  # last: a feed that is replayed may draw
        resumed, trained = None, True
        ended, stopped = _epoch(model, iterator, training, at, clock)
        logs = dict(at.logs)
        if state.stopped_by is not None:
            break  # part of an epoch is no epoch: histories hold whole ones
        over = ended or training.is_over(at)
        validates = training.validates(at.epoch)
        with keeper.again_if_stopped() if keeper and validates else contextlib.nullcontext():
            iterator = _close(training.feed, iterator, over, stopped)
            if validates:
                logs |= _validated(model, training)
        if state.stopped_by is not None:
            break
        callbacks.on_epoch_end(at.epoch, logs)
        at.epoch, at.step, at.logs = at.epoch + 1, 0, logs
        if over:
            at.goes_on, at.batches = False, 0
        wish = bool(model.stop_training)
        if _stops(model, wish, vote(_votes(model, wish)) if vote else None):
            at.is_over = state.stopped_by is None
            break
    if keeper is not None and trained:
        keeper.keep(at, wait=True)
    if iterator is not None:
        training.feed.end_pass()
    return logs


def _close(feed: Feed, iterator: Any, over: bool, stopped: bool) -> Any:
    """Ends an epoch, and its pass if that is over; returns the iterator that is left in use."""
    if over:
        feed.end_pass(whole=not stopped)
        return None
    feed.end_epoch()
    return iterator


def _is_whole(feed: Feed, batches: int) -> bool:
    """Whether so many batches are each of a pass."""
    return feed.steps is not None and batches == feed.steps


def _validated(model: keras.Model, training: Training) -> Logs:
    """Returns what the validation of an epoch found."""
    found = model.evaluate(
        training.validation,
        steps=training.validation_steps,
        callbacks=training.callbacks,
        return_dict=True,
    )
    return {f"val_{name}": value for name, value in found.items()}


def _is_sure(feed: Feed, count: int | None, at: Progress) -> bool:
    """Whether the rest of the epoch is known to be in the iterator in use."""
    return feed.holds(None if count is None else at.batches + count - at.step)


def _lost(model: keras.Model, feed: Feed, outcome: StepResult, before: int) -> int:
    """Returns how many examples of a pass could not be read so far; alike on all workers.

    Raises:
        DataError: with those that loading has left out, more than may be.
    """
    reading = state_of(model).reading
    if not reading.skip_bad_records:
        several = placement_of(model.distribute_strategy).workers > 1
        if several and int(outcome.lost):  # alone this worker has no batch of it
            raise found_by_any(model.distribute_strategy, feed)
        return 0
    now = int(outcome.lost)
    state_of(model).lost += now
    lost = before + now
    if now and lost + reading.lost_at_loading > reading.skip_bad_records:
        raise DataError(_too_many_lost(lost, reading))
    return lost


def _too_many_lost(lost: int, reading: ReadOptions) -> str:
    loaded = reading.lost_at_loading
    besides = f" and {loaded} when it was loaded," if loaded else ","
    return (
        f"{lost} examples of this pass over the data could not be read{besides} more than "
        f"--skip_bad_records {reading.skip_bad_records} allows; each was named when it was read. "
        "Mend the data, or allow more."
    )


def _next_of(feed: Feed) -> Any:
    """Returns what the next step takes, or None at the end of the data."""
    with told_by(feed):
        return feed.next()


def _steps_left(training: Training, at: Progress) -> int:
    """Returns the steps until the end of `fit`; 0 where nobody knows."""
    return (training.epochs - at.epoch) * (training.steps or 0) - at.step


def _first_step(training: Training, at: Progress) -> int:
    return at.epoch * (training.steps or 0) + at.step


def _epoch(
    model: keras.Model, iterator: Any, training: Training, at: Progress, clock: StepClock
) -> tuple[bool, bool]:
    """Trains the rest of an epoch.

    Returns:
        Whether the data came to its end, and whether training was stopped within the epoch.
    """
    state, keeper = state_of(model), training.keeper
    clock.begin()
    stops = False
    sure = _is_sure(training.feed, training.steps, at)
    if not sure:
        local_steps.check_length_is_known(model)
    pace = training.pace if sure else StepsPerExecution(1)
    per_pass = training.steps_per_pass if state.reading.skip_bad_records else None
    before = _first_step(training, at) - at.step
    for first, last in _executions(training.steps, pace, at.step, per_pass, before):
        if per_pass and (before + first) % per_pass == 0:
            at.lost = 0
        source = iterator if sure else clock.waiting(lambda: _next_of(training.feed))
        if source is None:
            _check_data_was_enough(training.steps, first, state.steps)
            at.logs = as_floats(at.logs)
            clock.stop(state, training.feed)
            return True, False
        training.callbacks.on_train_batch_begin(first)
        count, wish = last - first + 1, bool(model.stop_training)
        due = keeper is not None and keeper.wants(count)
        clock.start()
        with told_by(training.feed):
            outcome = run(model, model.train_function, source, count, wish, due, pace)
        state.steps += count
        state.examples += int(outcome.rows)
        clock.add(outcome)
        pace.add(clock.period_s, clock.inside_s, _steps_left(training, at) - count)
        at.lost = _lost(model, training.feed, outcome, at.lost)
        at.step, at.batches, at.logs = last + 1, at.batches + count, outcome.epoch_logs
        heartbeat().step(state.steps)
        training.callbacks.on_train_batch_end(last, outcome.logs)
        stops = _stops(model, bool(model.stop_training), outcome.votes)
        if keeper is not None and trainer_state.wants_checkpoint(outcome.votes):
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
    """Returns loss and metrics over the feed's first `count` batches (None: all)."""
    model.stop_evaluating = False
    callbacks.on_test_begin()
    model.reset_metrics()
    logs: Logs = {}
    iterator, sure, taken, lost = feed.iterate(0), feed.holds(count), 0, 0
    stops = False
    for first, last in _executions(
        count, StepsPerExecution(model.steps_per_execution if sure else 1)
    ):
        source = iterator if sure else _next_of(feed)
        if source is None:
            _check_data_was_enough(count, first, first)
            break
        callbacks.on_test_batch_begin(first)
        wish = bool(model.stop_evaluating)
        with told_by(feed):
            outcome = run(model, model.test_function, source, last - first + 1, wish)
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
    """Returns the outputs of the feed's first `count` batches (None: all), rows in order."""
    model.stop_predicting = False
    callbacks.on_predict_begin()
    batches = []
    several = placement_of(model.distribute_strategy).workers > 1
    iterator, sure = feed.iterate(0), feed.holds(count)
    for first, last in _executions(count, StepsPerExecution(1)):
        source = iterator if sure else _next_of(feed)
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


def run(
    model: keras.Model,
    execute: Execution,
    source: Any,
    count: int,
    wish: bool,
    checkpoint: bool = False,
    pace: StepsPerExecution | None = None,
) -> StepResult:
    """Returns what an execution gave.

    `wish` is whether this worker wants to stop, `checkpoint` whether it wants one afterwards, and
    `pace` learns how many steps the next one has.

    Raises:
        DataError: the workers do not read the same batches; on all workers alike.
    """
    with heartbeat().working(execute):
        place = placement_of(model.distribute_strategy)
        steps_wanted = 0
        # Steps that gather rows run one by one (`Execution`): several a call would gain nothing.
        if pace is not None and place.is_chief and not state_of(model).gathers:
            steps_wanted = pace.wish
        outcome = execute(source, count, _votes(model, wish, checkpoint, steps_wanted))
        digests = outcome.digests.numpy() if place.workers > 1 else [0]  # waits for it
    outcome = outcome._replace(votes=np.asarray(outcome.votes).tolist())  # read once
    if pace is not None:
        pace.agree(trainer_state.agreed_pace(outcome.votes, place.local_replicas))
    if any(digest != digests[0] for digest in digests):
        raise DataError(
            "the workers read different batches: the data is shuffled without a seed, or is not "
            "the same on all workers. Give shuffle(seed=...), or pass arrays, which tfmulti "
            "shuffles alike everywhere."
        )
    return outcome


def as_floats(logs: Logs) -> Logs:
    """Returns logs with scalars as floats, and vectors as lists."""
    arrays = {name: np.asarray(value) for name, value in logs.items()}
    return {name: float(a) if a.ndim == 0 else a.tolist() for name, a in arrays.items()}


def concatenated(*parts: Any) -> Any:
    """Returns the rows of all parts together; dense ones as an array."""
    joined = tf.concat(parts, axis=0) if len(parts) > 1 else parts[0]
    return joined.numpy() if isinstance(joined, tf.Tensor) else joined


def draw_seed(model: keras.Model) -> int:
    """Returns the seed of the data order, the same on all workers.

    It follows from the state of NumPy's global generator, which stays as it is, and from how many
    seeds this model has drawn.
    """
    state = state_of(model)
    if state.options.seed is not None:
        return state.options.seed
    state.seeds_drawn += 1
    generator = np.random.RandomState()
    generator.set_state(np.random.get_state())
    # float32 carries a number below 2**20 exactly, times 16 replicas.
    drawn = int(generator.randint(2**20, size=state.seeds_drawn)[-1])
    place = placement_of(model.distribute_strategy)
    if place.workers == 1:
        return drawn
    vote = make_vote(model.distribute_strategy)
    return round(vote([drawn if place.is_chief else 0])[0] / place.local_replicas)


def check_same_data(model: keras.Model, *feeds: Feed | None) -> None:
    """Checks that all workers have the same data. Runs on every worker.

    Raises:
        DataError: they have not; on all workers alike.
    """
    told = str([(type(feed).__name__, feed.digest) if feed else None for feed in feeds])
    known = hashlib.sha256(told.encode()).digest()[:16]
    of_all = gather(model.distribute_strategy, np.frombuffer(known, np.uint16).tolist())
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

    Where the number of steps is unknown an execution is one step: the data may end anywhere.
    None goes beyond a pass of `per_pass` steps, so that what it lost is one pass's; `before`
    steps were in the epochs before.

    >>> list(_executions(8, Pace(4), 0, per_pass=5, before=8))
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
    interrupted = state_of(model).interrupted
    return trainer_state.votes(wish, interrupted, wants_checkpoint=checkpoint, pace=steps_wanted)


def _stops(model: keras.Model, wish: bool, counted: Any) -> bool:
    """Returns whether to stop here: the same answer on all workers at the same step.

    With one worker a wish counts at once; with several, when the others know of it.
    """
    alone = placement_of(model.distribute_strategy).workers == 1
    reason = trainer_state.verdict(_votes(model, wish) if alone else counted)
    if reason in ("SIGINT", "SIGTERM"):
        state_of(model).stopped_by = reason
        model.stop_training = True
    return reason is not None


def _check_data_was_enough(count: int | None, seen: int, ever: int) -> None:
    """Warns of `seen` steps instead of `count`, and refuses data that `ever` gave none."""
    if ever == 0:
        raise DataError("the data has no batches. Give a Dataset that yields at least one.")
    if count is not None:
        warnings.warn(
            f"the data ended after {seen} of {count} steps. "
            "Use Dataset.repeat(), or ask for fewer steps.",
            stacklevel=4,
        )

"""Compares the first steps on the replicas with the same steps on one device by plain Keras.

Both runs begin with the same state and the same global batches. Afterwards the model has the state
that it had before. Every worker takes the steps on one device by itself, with the whole global
batches. Then the workers vote on what they have found, so all of them go on or fail together.

If the numbers differ, the comparison is repeated from other weights, up to `ATTEMPTS` times.
Rounding may decide a single comparison, but a wrong computation differs each time.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from tfmulti.config.console import speaker
from tfmulti.distribution import connections, strategies
from tfmulti.distribution.agreement import gather, gather_bytes
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import ConfigError, DataError, ModelError, VerificationError
from tfmulti.keras_patches.model_structure import layers_of
from tfmulti.keras_patches.variables import strategy_of
from tfmulti.training.input.feed import DataArguments, SourceFeed, make_feed
from tfmulti.training.input.interface import Feed
from tfmulti.training.input.replay import BatchTrial, Trial
from tfmulti.training.input.worker_batch import WorkerBatch
from tfmulti.training.loop import same_data
from tfmulti.training.loop.data_faults import data_faults_explained
from tfmulti.training.state import model_checks, relocation
from tfmulti.training.state.trainer_state import is_prepared, state_of
from tfmulti.training.verification import comparison
from tfmulti.training.verification.comparison import Difference
from tfmulti.training.verification.ownership import is_of_user, own_parts
from tfmulti.training.verification.result import Verification
from tfmulti.training.verification.step_comparison import StepComparison

# A difference is an error only if it is found in this many comparisons, each from other weights.
# If an input of a ReLU is next to 0, rounding decides whether a row counts. A large layer had such
# an input in one of ten comparisons.
ATTEMPTS = 4
# The chief reports a comparison that took more seconds than this.
REPORTED_FROM_S = 1.0


def is_due(model: keras.Model) -> bool:
    """Returns whether a training compares now: once for each `compile`, as `prepare` says."""
    if model.train_function.is_verified:
        return False
    options = state_of(model).options
    if options.verify is not None:
        return options.verify
    several = placement_of(model.distribute_strategy).replicas > 1 or options.microbatches > 1
    return several and bool(own_parts(model))


def reason_to_skip(model: keras.Model) -> str | None:
    """Returns why a model cannot have one device's numbers on replicas, or None if it can."""
    state, placement = state_of(model), placement_of(model.distribute_strategy)
    several = placement.replicas > 1
    layers = layers_of(model)
    policies = {layer.dtype_policy.name for layer in layers}
    normalizes = any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers)
    reasons = {
        "gradient_compression rounds the gradients between workers": placement.workers > 1
        and state.options.gradient_compression != "none",
        "mixed_float16 may skip steps that overflow": "mixed_float16" in policies,
        "sync_batch_norm=False takes each replica's own batch statistics": several
        and normalizes
        and not state.options.sync_batch_norm,
        "with microbatches BatchNormalization sees one pass at a time": normalizes
        and state.options.microbatches > 1,
        "skip_bad_records leaves out other rows on each worker": state.reading.skips_bad,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class FirstSteps:
    """The comparison of the first steps of `fit`, if one is due. Every worker makes it.

    With callbacks of the user's own it takes place when plain Keras would trace the step: what they
    change at the begin of the training, of the epoch and of the batch belongs to the step. The
    callbacks of Keras and tfmulti change nothing there that a trace keeps. With these alone it
    takes place before them, so that a run with other numbers writes nothing.

    Args:
        model: the prepared, compiled and built model, with a train function.
        feed: the feed of the training.
        steps_per_epoch: the steps of an epoch, or None if only reading tells it.
        reports_time: whether the chief prints how long the comparison took, if that was long.
    """

    def __init__(
        self, model: keras.Model, feed: Feed, steps_per_epoch: int | None, *, reports_time: bool
    ) -> None:
        self._model, self._feed, self._steps = model, feed, steps_per_epoch
        self._reports_time = reports_time
        self._is_due = is_due(model) and not _note_reason_to_skip(model)
        self._trial: Trial | None = None

    def compare_before(self, callbacks: Sequence[Any]) -> None:
        """Compares now if no worker has callbacks of the user's own. Every worker calls it.

        Raises:
            VerificationError: as for `compare`.
        """
        if not self._is_due:
            return
        has_own = any(map(_runs_user_code, callbacks))
        # The workers may have different callbacks, but must compare at the same time.
        of_workers = gather(self._model.distribute_strategy, [has_own])
        if not any(own for (own,) in of_workers):
            self.read()
            self.compare()

    def read(self) -> None:
        """Reads the first batches, before the training takes them. Every worker calls it."""
        if not self._is_due:
            return
        self._is_due = False
        model, feed, options = self._model, self._feed, state_of(self._model).options
        is_long_enough = feed.data.holds(self._steps)
        at_once = int(model.steps_per_execution) if is_long_enough else 1
        count = options.verify_steps if at_once == 1 else max(options.verify_steps, 2)
        replayed = -(-count // at_once) * at_once
        if self._steps:
            count, replayed = min(count, self._steps), min(replayed, self._steps)
        if options.steps_per_execution == "auto" and not isinstance(feed, SourceFeed):
            # The number of steps of an execution may change later. No execution can take from both
            # the replayed batches and the rest. The first execution has one step in any case.
            count = replayed = 1
        # It is None if an example cannot be read. The training tells which one it is, and on which
        # worker.
        self._trial = _trial_of_all(
            model, lambda: Trial(feed, count, replayed, is_long_enough=is_long_enough)
        )

    def compare(self) -> None:
        """Compares the steps of the batches that were read. Every worker calls it.

        Raises:
            VerificationError: the numbers differ, or they cannot be compared and
                `prepare(verify=True)` asked for it.
        """
        trial, self._trial = self._trial, None
        if trial is None:
            return
        model, state = self._model, state_of(self._model)
        with contextlib.closing(trial), data_faults_explained(self._feed):
            if not trial.batches:
                return
            state.verification = check(model, trial, required=bool(state.options.verify))
            model.train_function.is_verified = True
            if self._reports_time and state.verification.seconds_apart > REPORTED_FROM_S:
                speaker(placement_of(model.distribute_strategy).is_chief)(
                    "verify", cost_in_words(state.verification)
                )

    def close(self) -> None:
        """Ends the threads that read the data for a comparison that did not take place."""
        if self._trial is not None:
            self._trial.close()


def _runs_user_code(callback: Any) -> bool:
    """Returns whether a callback runs code of the user's own."""
    return is_of_user(callback) or isinstance(callback, keras.callbacks.LambdaCallback)


def before_batch(model: keras.Model, batch: Any, given: WorkerBatch) -> None:
    """Compares the step of `train_on_batch` if a comparison is due. Every worker calls it.

    Args:
        model: the prepared, compiled and built model, with a train function.
        batch: the global batch.
        given: the same batch, as the replicas of this worker take it.

    Raises:
        VerificationError: as for `FirstSteps.compare`.
    """
    if is_due(model) and not _note_reason_to_skip(model):
        required = bool(state_of(model).options.verify)
        state_of(model).verification = check(model, BatchTrial(batch, given), required=required)
    # The search for parts that are not known takes 40 ms for 300 layers.
    model.train_function.is_verified = True


def _note_reason_to_skip(model: keras.Model) -> bool:
    """Notes why a model cannot have one device's numbers, and returns whether that is so.

    If the user has asked for the comparison, a warning gives the reason.
    """
    reason, state = reason_to_skip(model), state_of(model)
    if reason is None:
        return False
    state.verification = Verification(verdict="skipped", reason=reason)
    model.train_function.is_verified = True
    if state.options.verify and placement_of(model.distribute_strategy).is_chief:
        warnings.warn(f"verify: the numbers are not compared: {reason}.", stacklevel=4)
    return True


def _trial_of_all(model: keras.Model, make: Callable[[], Trial]) -> Trial | None:
    """Returns the first batches, or None if some worker cannot read an example of them.

    Every worker calls it. Otherwise the other workers would wait in a collective for a worker that
    has no data.
    """
    trial = None
    with contextlib.suppress(DataError):
        trial = make()
    strategy = model.distribute_strategy
    if any(fails for (fails,) in gather(strategy, [trial is None])):
        if trial is not None:
            trial.close()
        return None
    return trial


def cost_in_words(result: Verification) -> str:
    """Returns a line that tells the result of a comparison and how long it took."""
    steps = "the first step" if result.steps == 1 else f"the first {result.steps} steps"
    return (
        f"{steps} on {result.replicas} replicas gave one device's numbers ({result.quantities} "
        f"compared); that took {result.seconds_apart:.1f} s"
    )


def verify(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    class_weight: Mapping[int, float] | None = None,
    steps: int = 1,
) -> Verification:
    """Compares the first steps on the replicas with those on one device by plain Keras.

    Every worker calls it alike, with the same data. The data is taken in its order, without a
    shuffle. Afterwards the model has the state that it had before.

    Args:
        model: the prepared and compiled model.
        x: the data, as `fit` takes it.
        y: the targets, as `fit` takes them.
        sample_weight: the weights of the rows, as `fit` takes them.
        batch_size: the global batch size.
        class_weight: the weight of each class, as `fit` takes it.
        steps: the number of steps to compare.

    Returns:
        The result, whose verdict is `skipped` if the model's options do not give one device's
        numbers.

    Raises:
        VerificationError: the numbers differ by more than rounding explains, or cannot be compared.
            The message says which number differs, by how much, and what to do.
        ModelError: the model is not prepared or not compiled.
        ConfigError: `steps` is below 1.
        DataError: the data has no batches, or the workers have different data.
    """
    if not is_prepared(model):
        raise ModelError("verify() takes a model that was prepared. Call prepare(model) first.")
    if steps < 1:
        raise ConfigError(f"steps is {steps}, but it must be at least 1.")
    model_checks.check_compiled(model)
    relocation.enter(model)
    placement = placement_of(model.distribute_strategy)
    data = DataArguments(x, y, sample_weight, batch_size, class_weight)
    feed = make_feed(data, placement, state_of(model).reading)
    with connections.call_of_all(placement, "verify"):
        return _verified(model, feed, steps)


def _verified(model: keras.Model, feed: Feed, steps: int) -> Verification:
    """Makes the comparison of `verify`."""
    same_data.check_same_data(model, feed)
    model_checks.build(model, feed.data.specs, optimizers=model_checks.is_traced_late(model))
    state_of(model).specs = feed.data.specs
    model.make_train_function()
    reason = reason_to_skip(model)
    if reason is not None:
        return Verification(verdict="skipped", reason=reason)
    trial = Trial(feed, steps, steps, is_long_enough=feed.data.holds(steps))
    with contextlib.closing(trial), data_faults_explained(feed):
        if not trial.batches:
            raise DataError("the data has no batches. Give a Dataset that yields at least one.")
        result = state_of(model).verification = check(model, trial, required=True)
        model.train_function.is_verified = True
        feed.end_pass()
    return result


def check(model: keras.Model, trial: Trial | BatchTrial, *, required: bool) -> Verification:
    """Compares the first steps, and returns the result. Every worker calls it.

    Raises:
        VerificationError: the numbers differ, or they cannot be compared and `required` is True.
            All workers raise it.
    """
    started = time.perf_counter()
    strategy = strategies.made()
    if strategy is not None and strategy_of(model) is None:
        raise VerificationError(
            f"verify: the model trains on one device, although this process made a strategy of "
            f"{strategy.num_replicas_in_sync} replicas. Make and compile the model inside 'with "
            "strategy.scope():'."
        )
    model_checks.build_optimizer(model)
    comparer = StepComparison(model, trial)
    with _without_warnings(model), comparer.state_kept():
        for attempt in range(ATTEMPTS):
            if attempt:
                comparer.begin_elsewhere(attempt)
            differences, problem = comparer.compare()
            failure = comparison.first_of(differences)
            differs = failure is not None or bool(comparer.draws[0])
            verdict = _verdict_of_all(model, problem, differs)
            if verdict is None:
                traced = state_of(model).traced
                traced.compared.update(traced.unknown.get("train_step", ()))
                return _report(comparer, differences, started)
            rank, is_impossible = verdict
            if is_impossible or comparer.draws[0]:
                break
        if not is_impossible:
            problem = comparer.difference_in_words(failure)
        message = gather_bytes(model.distribute_strategy, problem.encode())[rank]
    assert message is not None
    reason = message.decode()
    if required or not is_impossible:
        raise VerificationError(reason)
    if comparer.placement.is_chief:
        words = f"verify: the first step could not be compared with one device: {reason}"
        warnings.warn(words, stacklevel=3)
    return Verification(verdict="skipped", reason=reason)


@contextlib.contextmanager
def _without_warnings(model: keras.Model) -> Iterator[None]:
    """Delays the warnings that values may differ, because the comparison may show that they do not.

    The next step gives the warnings that are left.
    """
    traced = state_of(model).traced
    traced.is_compared_now = True
    try:
        yield
    finally:
        traced.is_compared_now = False


def _verdict_of_all(model: keras.Model, problem: str, differs: bool) -> tuple[int, bool] | None:
    """Returns the worker whose failure is reported, and whether its comparison was impossible.

    It returns None if the numbers are the same on all workers. Every worker calls it: it is a
    collective.
    """
    # Numbers that differ on a worker weigh more than a comparison that could not be made.
    votes = gather(model.distribute_strategy, [differs, bool(problem)])
    for is_impossible in (False, True):
        for rank, vote in enumerate(votes):
            if vote[is_impossible]:
                return rank, is_impossible
    return None


def _report(
    comparer: StepComparison, differences: Sequence[Difference], started: float
) -> Verification:
    """Returns the result of a comparison in which all numbers were the same."""
    decided = [d for d in differences if d.kind != "undecided"]
    closest = max(decided, key=lambda d: d.excess, default=None)
    return Verification(
        verdict="same",
        steps=comparer.steps,
        replicas=comparer.placement.replicas,
        quantities=len(decided),
        undecided=len(differences) - len(decided),
        closest=closest.name if closest else "",
        difference=closest.difference if closest else 0.0,
        limit=closest.limit if closest else 0.0,
        seconds=round(time.perf_counter() - started, 3),
        seconds_apart=round(comparer.seconds_apart, 3),
    )

"""Compares the first steps on the replicas with the same steps on one device by plain Keras.

Both begin with the same state and the same global batches; afterwards the state is what it was.
Every worker computes the global batch by itself, so this works on one and on several workers; the
workers vote on what they found.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tfmulti.config.console import speaker
from tfmulti.distribution import strategies
from tfmulti.distribution.broadcast import broadcast
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import ConfigError, DataError, ModelError, VerificationError
from tfmulti.keras_patches.model_structure import layers_of
from tfmulti.keras_patches.variables import strategy_of
from tfmulti.training.input.feed import Feed, SourceFeed, make_feed
from tfmulti.training.input.replay import Trial
from tfmulti.training.loop import loops
from tfmulti.training.state import model_checks, relocation
from tfmulti.training.state.trainer_state import is_prepared, state_of
from tfmulti.training.step import local_steps
from tfmulti.training.step.votes import gather, make_vote
from tfmulti.training.verification import comparison
from tfmulti.training.verification.comparison import Difference
from tfmulti.training.verification.ownership import own_parts
from tfmulti.training.verification.result import Verification
from tfmulti.training.verification.step_comparison import StepComparison

# So often a comparison is made, each time from other weights, before a difference is an error.
# Where an input of a ReLU is next to 0, rounding decides whether a row counts: a large layer had
# such an input in one of ten comparisons.
ATTEMPTS = 4
# Seconds of a comparison from which on it is told in a line.
TOLD_FROM_S = 1.0


def is_due(model: keras.Model) -> bool:
    """Whether `fit` is to compare: once a compile, as `prepare(verify=…)` says."""
    wanted = state_of(model).options.verify
    if wanted is None:
        several = placement_of(model.distribute_strategy).replicas > 1
        wanted = several and bool(own_parts(model))
    return wanted and not model.train_function.is_verified


def reason_to_skip(model: keras.Model) -> str | None:
    """Returns why a model's numbers on replicas are not to be one device's, if that is so."""
    state, place = state_of(model), placement_of(model.distribute_strategy)
    several = place.replicas > 1
    layers = layers_of(model)
    policies = {layer.dtype_policy.name for layer in layers}
    normalizes = any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers)
    reasons = {
        "sync_every lets workers take steps of their own": local_steps.is_on(model),
        "gradient_compression rounds the gradients between workers": place.workers > 1
        and state.options.gradient_compression != "none",
        "mixed_float16 may skip steps that overflow": "mixed_float16" in policies,
        "sync_batch_norm=False takes each replica's own batch statistics": several
        and normalizes
        and not state.options.sync_batch_norm,
        "with microbatches BatchNormalization sees one pass at a time": normalizes
        and state.options.microbatches > 1,
        "skip_bad_records leaves out other rows on each worker": state.reading.skip_bad_records > 0,
    }
    return next((words for words, holds in reasons.items() if holds), None)


def before_training(
    model: keras.Model,
    feed: Feed,
    steps_per_epoch: int | None,
    *,
    keeps_position: bool,
    tells: bool,
) -> Feed:
    """Returns the feed to train on, after the comparison that is due.

    Args:
        keeps_position: whether checkpoints will ask the feed where it is.
        tells: whether the chief prints what the comparison took, if that was long.

    Raises:
        VerificationError: the numbers differ, or cannot be compared although that was asked for.
    """
    state = state_of(model)
    if not is_due(model):
        return feed
    reason = reason_to_skip(model)
    if reason is not None:
        state.verification = Verification(verdict="skipped", reason=reason)
        model.train_function.is_verified = True
        if state.options.verify and placement_of(model.distribute_strategy).is_chief:
            warnings.warn(f"verify: the numbers are not compared: {reason}.", stacklevel=3)
        return feed
    if keeps_position:
        feed.keep_position()
    sure = feed.holds(steps_per_epoch)
    at_once = local_steps.steps_at_once(model) if sure else 1
    count = state.options.verify_steps if at_once == 1 else max(state.options.verify_steps, 2)
    kept = -(-count // at_once) * at_once
    if steps_per_epoch:
        count, kept = min(count, steps_per_epoch), min(kept, steps_per_epoch)
    if state.options.steps_per_execution == "auto" and not isinstance(feed, SourceFeed):
        # Executions may have more steps later, and none can take from what is kept and the rest.
        count = kept = 1
    trial = _trial_of_all(model, lambda: Trial(feed, count, kept, sure=sure))
    if trial is None:
        return feed  # the training tells which example it is, and on which worker
    with contextlib.closing(trial):
        if trial.batches:
            required = bool(state.options.verify)
            state.verification = check(model, trial, required=required)
            model.train_function.is_verified = True
            if tells and state.verification.seconds_apart > TOLD_FROM_S:
                speaker(placement_of(model.distribute_strategy).is_chief)(
                    "verify", cost_in_words(state.verification)
                )
    return trial.feed


def _trial_of_all(model: keras.Model, make: Callable[[], Trial]) -> Trial | None:
    """Returns the first batches, or None where an example of them cannot be read on some worker.

    Every worker calls it: none may wait in a collective for one that has no data.
    """
    trial = None
    with contextlib.suppress(DataError):
        trial = make()
    strategy = model.distribute_strategy
    if placement_of(strategy).workers > 1 and make_vote(strategy)([float(trial is None)])[0] > 0:
        if trial is not None:
            trial.close()
        return None
    return trial


def cost_in_words(found: Verification) -> str:
    """Returns what a comparison found and took, in a line."""
    steps = "the first step" if found.steps == 1 else f"the first {found.steps} steps"
    return (
        f"{steps} on {found.replicas} replicas gave one device's numbers ({found.quantities} "
        f"compared); that took {found.seconds_apart:.1f} s"
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

    The model is prepared and compiled. Its state is put back afterwards. Every worker calls it
    alike, on the same data; the arguments are those of `fit`, with `batch_size` the global batch.
    Data is taken in its order.

    Raises:
        VerificationError: the numbers differ by more than rounding explains, or cannot be
            compared; the message says which, by how much, and what to do.
    """
    if not is_prepared(model):
        raise ModelError("verify() takes a model that was prepared. Call prepare(model) first.")
    if steps < 1:
        raise ConfigError(f"steps is {steps}, but it must be at least 1.")
    model_checks.check_compiled(model)
    relocation.enter(model)
    feed = make_feed(
        x,
        y,
        sample_weight,
        placement=placement_of(model.distribute_strategy),
        batch_size=batch_size,
        class_weight=class_weight,
        reading=state_of(model).reading,
    )
    loops.check_same_data(model, feed)
    model_checks.build(model, feed.specs, optimizers=True)
    state_of(model).specs = feed.specs
    model.make_train_function()
    reason = reason_to_skip(model)
    if reason is not None:
        return Verification(verdict="skipped", reason=reason)
    sure = feed.holds(steps)
    trial = Trial(feed, steps, steps, sure=sure)
    with contextlib.closing(trial):
        if not trial.batches:
            raise DataError("the data has no batches. Give a Dataset that yields at least one.")
        found = check(model, trial, required=True)
        model.train_function.is_verified = True
        feed.end_pass()
    return found


def check(model: keras.Model, trial: Trial, *, required: bool) -> Verification:
    """Returns what the comparison found. Every worker calls it; the model is built and compiled.

    Args:
        trial: the first global batches.
        required: whether a comparison that cannot be made is an error, and not a warning.

    Raises:
        VerificationError: the numbers differ; on all workers alike.
    """
    started = time.perf_counter()
    made = strategies.made()
    if made is not None and strategy_of(model) is None:
        raise VerificationError(
            f"verify: the model trains on one device, although this process made a strategy of "
            f"{made.num_replicas_in_sync} replicas. Make and compile the model inside 'with "
            "strategy.scope():'."
        )
    comparer = StepComparison(model, trial)
    with comparer.state_kept():
        for attempt in range(ATTEMPTS):
            if attempt:
                comparer.begin_elsewhere(attempt)
            found, problem = comparer.compare()
            failure = comparison.first_of(found)
            worst = _verdict_of_all(model, problem, failure is not None or bool(comparer.draws[0]))
            if worst is None:
                return _report(comparer, found, started)
            rank, could_not = worst
            if could_not or comparer.draws[0]:
                break
        if not could_not:
            problem = comparer.difference_in_words(failure)
        message = broadcast(model.distribute_strategy, problem.encode(), rank)
    assert message is not None
    if could_not and not required:
        words = f"verify: the first step could not be compared with one device: {message.decode()}"
        if comparer.place.is_chief:
            warnings.warn(words, stacklevel=3)
        return Verification(verdict="skipped", reason=message.decode())
    raise VerificationError(message.decode())


def _verdict_of_all(model: keras.Model, problem: str, fails: bool) -> tuple[int, bool] | None:
    """Returns the first worker that has something to tell, and whether it could not compare.

    None: the numbers are the same on all workers. It is a collective on several.
    """
    told = gather(model.distribute_strategy, [bool(problem), fails])
    for which in (1, 0):  # numbers that differ anywhere weigh more than what could not be done
        for rank, each in enumerate(told):
            if each[which]:
                return rank, which == 0
    return None


def _report(comparer: StepComparison, found: Sequence[Difference], started: float) -> Verification:
    decided = [d for d in found if d.kind != "undecided"]
    closest = max(decided, key=lambda d: d.excess, default=None)
    return Verification(
        verdict="same",
        steps=comparer.steps,
        replicas=comparer.place.replicas,
        quantities=len(decided),
        undecided=len(found) - len(decided),
        closest=closest.name if closest else "",
        difference=closest.difference if closest else 0.0,
        limit=closest.limit if closest else 0.0,
        seconds=round(time.perf_counter() - started, 3),
        seconds_apart=round(comparer.seconds_apart, 3),
    )

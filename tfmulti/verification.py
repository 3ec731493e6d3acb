"""Compares the first steps on the replicas with the same steps on one device by plain Keras.

Both begin with the same state and the same global batches; afterwards the state is what it was.
Every worker computes the global batch by itself, so this works on one and on several workers; the
workers vote on what they found.
"""

from __future__ import annotations

import contextlib
import random
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti import (
    comparison,
    epochs,
    keras_compat,
    local_steps,
    model_checks,
    recording,
    relocation,
    run_state,
    steps,
)
from tfmulti.broadcast import broadcast
from tfmulti.comparison import Difference
from tfmulti.errors import ConfigError, DataError, ModelError, VerificationError
from tfmulti.feed import Feed, make_feed
from tfmulti.ownership import own_parts
from tfmulti.pipeline import from_batch
from tfmulti.replay import Trial
from tfmulti.replicas import metric_variables
from tfmulti.report import Verification
from tfmulti.stopping import VOTES, is_prepared, state_of
from tfmulti.strategies import Placement, placement_of
from tfmulti.votes import make_vote

Values = dict[str, list[np.ndarray]]

# A learning rate of 0, as a warm-up begins with, would hide what the gradients are.
VISIBLE_RATE = 1e-3
STEPS_OF_SCHEDULE = (1, 10, 100, 1000, 10_000)
# A quantity that a last digit of the weights changes by so much tells nothing.
MOST_SENSITIVE = 0.1
_NOTHING: Sequence[float] = [0.0] * len(VOTES)
# Operations that draw by generators of TensorFlow's own.
_DRAWS = (
    "RandomUniform",
    "RandomUniformInt",
    "RandomStandardNormal",
    "TruncatedNormal",
    "ParameterizedTruncatedNormal",
    "RandomShuffle",
    "RandomGammaRandomGrad",
    "RandomGamma",
    "RandomPoissonV2",
    "Multinomial",
    "RngReadAndSkip",
    "RngSkip",
    "StatefulStandardNormalV2",
    "StatefulUniform",
    "StatefulUniformInt",
    "StatefulTruncatedNormal",
)


def is_due(model: keras.Model) -> bool:
    """Whether `fit` is to compare: once a compile, as `prepare(verify=…)` says."""
    wanted = state_of(model).verify
    if wanted is None:
        several = placement_of(model.distribute_strategy).replicas > 1
        wanted = several and bool(own_parts(model))
    return wanted and not model.train_function.is_verified


def reason_to_skip(model: keras.Model) -> str | None:
    """Returns why a model's numbers on replicas are not to be one device's, if that is so."""
    state, place = state_of(model), placement_of(model.distribute_strategy)
    several = place.replicas > 1
    policies = {layer.dtype_policy.name for layer in keras_compat.layers_of(model)}
    normalizes = any(
        isinstance(layer, keras.layers.BatchNormalization) for layer in keras_compat.layers_of(model)
    )
    reasons = {
        "sync_every lets workers take steps of their own": local_steps.is_on(model),
        "gradient_compression rounds the gradients between workers": place.workers > 1
        and state.gradient_compression != "none",
        "mixed_float16 may skip steps that overflow": "mixed_float16" in policies,
        "sync_batch_norm=False takes each replica's own batch statistics": several
        and normalizes
        and not state.sync_batch_norm,
        "with microbatches BatchNormalization sees one pass at a time": normalizes
        and state.microbatches > 1,
        "skip_bad_records leaves out other rows on each worker": state.reading.skip_bad_records > 0,
    }
    return next((words for words, holds in reasons.items() if holds), None)


def before_training(
    model: keras.Model, feed: Feed, steps_per_epoch: int | None, *, keeps_position: bool
) -> Feed:
    """Returns the feed to train on, after the comparison that is due.

    Args:
        keeps_position: whether backups will ask the feed where it is.

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
        if state.verify and placement_of(model.distribute_strategy).is_chief:
            warnings.warn(f"verify: the numbers are not compared: {reason}.", stacklevel=3)
        return feed
    if keeps_position:
        feed.keep_position()
    sure = feed.holds(steps_per_epoch)
    at_once = local_steps.steps_at_once(model) if sure else 1
    count = state.verify_steps if at_once == 1 else max(state.verify_steps, 2)
    kept = -(-count // at_once) * at_once
    if steps_per_epoch:
        count, kept = min(count, steps_per_epoch), min(kept, steps_per_epoch)
    if state.chooses_pace:  # executions may have more steps later, and none takes from both parts
        kept = 1
    trial = Trial(feed, min(count, kept) if state.chooses_pace else count, kept, sure=sure)
    with contextlib.closing(trial):
        if trial.batches:
            required = bool(state.verify)
            state.verification = check(model, trial, required=required)
            model.train_function.is_verified = True
    return trial.feed


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
    epochs.check_same_data(model, feed)
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
    comparer = _Comparer(model, trial)
    with comparer.state_kept():
        after, logs = comparer.on_replicas()
        begun = time.perf_counter()
        found, problem = comparer.on_one_device(after, logs)
        failure = comparison.first_of(found)
        fails = failure is not None or bool(comparer.draws[0])
        worst = _verdict_of_all(model, problem, fails)
        if worst is None:
            return _report(model, comparer, found, started, time.perf_counter() - begun)
        rank, could_not = worst
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
    strategy = model.distribute_strategy
    place = placement_of(strategy)
    mine = [float(bool(problem)), float(fails)]
    if place.workers == 1:
        told = [mine]
    else:
        own = [0.0] * (2 * place.workers)
        own[2 * place.rank : 2 * place.rank + 2] = mine
        counted = make_vote(strategy)(own)
        told = [counted[2 * rank : 2 * rank + 2] for rank in range(place.workers)]
    for which in (1, 0):  # numbers that differ anywhere weigh more than what could not be done
        for rank, each in enumerate(told):
            if each[which] > 0:
                return rank, which == 0
    return None


def _report(
    model: keras.Model,
    comparer: _Comparer,
    found: Sequence[Difference],
    started: float,
    apart_s: float,
) -> Verification:
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
        seconds_apart=round(apart_s, 3),
    )


class _Comparer:
    """One comparison: the model, the batches, and the state that both runs begin with.

    Attributes:
        steps: how many steps are taken.
        draws: the operations of the step that draw by TensorFlow's own generators, and the line
            of the first of them.
    """

    def __init__(self, model: keras.Model, trial: Trial) -> None:
        self._model, self._trial = model, trial
        self.place: Placement = placement_of(model.distribute_strategy)
        self.steps = len(trial.batches)
        self.draws: tuple[tuple[str, ...], str | None] = ((), None)
        self._at_once = self.steps if local_steps.steps_at_once(model) > 1 else 1
        self._device = self.place.gpus[0] if self.place.gpus else "CPU:0"
        self._unit = _unit_of(model, self.place)

    @contextlib.contextmanager
    def state_kept(self) -> Iterator[None]:
        """Inside, steps may be taken; at the end all numbers are what they were, to the bit."""
        model = self._model
        generators = run_state.random_states()
        self._python = random.getstate()
        if self.place.replicas == 1:
            model_checks.build_optimizers(model, state_of(model).specs)
        model.train_function.trace(self._trial.source(0), self._at_once, _NOTHING)
        self._roots = [model, *keras_compat.seed_generators(model).values()]
        self._state = relocation.find(*self._roots)
        originals = relocation.values_of(self._state)
        attributes = _attributes(self._state)
        try:
            model.reset_metrics()
            _show_updates(self._state)
            self._begin = relocation.values_of(self._state)
            yield
        finally:
            relocation.set_values(self._state, originals)
            if model.run_eagerly:
                _set_attributes(attributes)
            if not self._trial.draws:
                run_state.set_random_states(generators)

    def on_replicas(self) -> tuple[Values, Any]:
        """Takes the steps on the replicas; returns all values after them, and the logs."""
        model = self._model
        for step in range(0, self.steps, self._at_once):
            source = self._trial.source(step)
            outcome = epochs.run(model, model.train_function, source, self._at_once, False)
        logs = {name: np.asarray(value) for name, value in _flat(outcome.logs)}
        after = relocation.values_of(self._state)
        self._metrics = self._metric_sums(after)
        relocation.set_values(self._state, self._begin)
        return after, logs

    def _metric_sums(self, after: Values) -> dict[str, np.ndarray]:
        """Returns the metrics' variables over all replicas, as results are computed from them."""
        names = {id(variable): name for name, variable in self._state.named().items()}
        variables = metric_variables(self._model)
        if self.place.workers > 1:
            read = run_state.metric_states(self._model)
            parts = list(read.values())
        else:
            parts = []
            for v in variables:
                parts.append(np.stack(after[names[id(keras_compat.tf_variable_of(v))]]))
        found = {}
        for variable, part in zip(variables, parts, strict=True):
            name = names[id(keras_compat.tf_variable_of(variable))]
            if variable.aggregation == "mean":
                found[name] = part.mean(0, dtype=part.dtype)
            elif variable.aggregation == "only_first_replica":
                found[name] = part[0]
            else:
                found[name] = part.sum(0, dtype=part.dtype)
        return found

    def on_one_device(self, after: Values, logs: Any) -> tuple[list[Difference], str]:
        """Takes the steps on one device, and returns all differences, or why it cannot."""
        attributes = _attributes(self._state)
        try:
            with self._alone() as alone:
                step = alone.compiled(steps.step_of(self._model, "train_step"))
                there = alone.run(step, self._trial.batches)
                moved = alone.run(step, self._trial.batches, by_a_digit=True)
                self.draws = _random_operations(step)
            if self.draws[0]:  # two runs draw other numbers, so rounding cannot be measured
                return [], ""
            return self._differences(after, logs, there, moved), ""
        except Exception as error:
            words = " ".join(str(error).split())
            return [], f"{type(error).__name__}: {words[:400]}"
        finally:
            _set_attributes(attributes)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[_Alone]:
        seeds = state_of(self._model).seeds
        named = self._state.named()
        with (
            relocation.on_one_device(self._state, self._device) as plain,
            model_checks.as_made(self._model),
        ):
            if not self._trial.draws:
                random.setstate(self._python)  # a trace may draw by it, as AugMix does
            variables = {name: plain[id(v)] for name, v in named.items()}
            yield _Alone(self._model, variables, self._begin, seeds, self._unit)

    def _differences(
        self, after: Values, logs: Mapping[str, np.ndarray], there: _Run, moved: _Run
    ) -> list[Difference]:
        kinds = self._kinds()
        found: list[Difference] = []
        for name, copies in after.items():
            kind = kinds.get(name)
            if kind is None:
                continue
            alone, other, before = there.values[name], moved.values[name], self._begin[name][0]
            here = [self._metrics[name]] if kind == "metric" else copies
            each = [
                comparison.compare(kind, name, value, alone, other, before, self._unit)
                for value in here
                if value.dtype.kind not in "SUO"
            ]
            found += [max(each, key=lambda d: d.excess)] if each else []
        for name, value in logs.items():
            if name in there.logs and name in moved.logs:
                alone, other = there.logs[name], moved.logs[name]
                alone = alone.astype(value.dtype)
                found.append(comparison.compare("log", name, value, alone, other, None, self._unit))
        return [_decided(d) for d in found]

    def _kinds(self) -> dict[str, str]:
        """Returns what each variable is, by name; without those that cannot be compared."""
        model, kinds = self._model, {}
        of = keras_compat.tf_variable_of
        weights = {id(of(v)) for v in model.trainable_variables}
        slots = {id(of(v)) for o in self._state.optimizers for v in o.variables}
        metrics = {id(of(v)) for v in metric_variables(model)}
        seeds = {id(of(v)) for v in self._state.variables if keras_compat.is_seed(v)}
        drawn = {id(of(g.state)) for g in keras_compat.seed_generators(model).values()}
        on_read = {id(of(v)) for v in self._state.variables if v.synchronization == "on_read"}
        for name, variable in self._state.named().items():
            at = id(variable)
            if at in metrics:
                kinds[name] = "metric"
            elif at in drawn or at in on_read:
                continue
            elif at in seeds:
                kinds[name] = "seed"
            elif at in weights:
                kinds[name] = "weight"
            else:
                kinds[name] = "slot" if at in slots else "state"
        return kinds

    def difference_in_words(self, failure: Difference | None) -> str:
        """Returns the message of a comparison that failed on some worker. Every worker calls it."""
        if self.draws[0]:
            return comparison.draws_in_words(*self.draws)
        first = self.first_difference() or failure
        if first is None:
            return ""
        return comparison.in_words(first, replicas=self.place.replicas, steps=self.steps)

    def first_difference(self) -> Difference | None:
        """Returns where the runs part first, of one step that is traced anew for it.

        Every worker calls it: the replicas' step has collectives. None: it was not found out.
        """
        model, batch = self._model, self._trial.batches[0]
        if state_of(model).microbatches > 1:
            return None
        relocation.set_values(self._state, self._begin)
        here: list[recording.Notes] = []
        there: list[recording.Notes] = []
        shards = from_batch(batch, self.place)
        with recording.watched():
            step = steps.step_of(model, "train_step")
            seeds = state_of(model).seeds["training"]
            with keras_compat.step_replaced(model, recording.recorded(step, here.append)):
                one_step = steps.make_step(model, self.place, seeds, training=True)
            found, _ = one_step(shards)
            locals_ = [self._of_replica(found, i) for i in range(self.place.local_replicas)]
            relocation.set_values(self._state, self._begin)
            attributes = _attributes(self._state)
            try:
                with self._alone() as alone:
                    own = steps.step_of(model, "train_step")
                    step = alone.compiled(recording.recorded(own, there.append))
                    values = [np.asarray(v) for v in alone.call(step, batch)]
                    moved = [np.asarray(v) for v in alone.call(step, batch, by_a_digit=True)]
            except Exception:
                return None
            finally:
                _set_attributes(attributes)
        return self._first_note(shards, here, locals_, there[0], values, moved)

    def _of_replica(self, found: Any, local: int) -> list[np.ndarray]:
        strategy = self._model.distribute_strategy
        return [np.asarray(strategy.experimental_local_results(value)[local]) for value in found]

    def _first_note(
        self,
        shards: Any,
        here: Sequence[recording.Notes],
        locals_: Sequence[Sequence[np.ndarray]],
        there: recording.Notes,
        values: Sequence[np.ndarray],
        moved: Sequence[np.ndarray],
    ) -> Difference | None:
        """Returns the first note that differs; rows are compared with the same rows."""
        if not here:
            return None
        at = {key: place for place, key in enumerate(here[0].keys)}
        rows = int(shards.rows)
        for place, key in enumerate(there.keys):
            if key not in at:
                continue
            worst: Difference | None = None
            parts = [local[at[key]] for local in locals_]
            pairs = _pairs(key[0], parts, values[place], moved[place], shards, rows)
            for mine, alone, other in pairs:
                one = comparison.compare(key[0], key[1], mine, alone, other, None, self._unit)
                if one.limit == 0 and key[0] == "layer" and not alone.size:
                    continue
                if worst is None or one.excess > worst.excess:
                    worst = one
            # Outputs are rounded relative to what they are sums of, which is not known.
            if worst is not None and worst.difference > 10 * worst.limit:
                return _with_line(worst, there.lines[place])
        return None


def _with_line(found: Difference, line: str | None) -> Difference:
    values = {name: getattr(found, name) for name in Difference.__dataclass_fields__}
    return Difference(**(values | {"line": line}))


def _pairs(
    kind: str,
    parts: Sequence[np.ndarray],
    alone: np.ndarray,
    other: np.ndarray,
    shards: Any,
    rows: int,
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Returns what belongs together: the replicas' values, one device's, and these moved."""
    own_rows = [int(n) for n in shards.own_rows]
    if kind == "gradient":
        return [(part, alone, other) for part in parts if part.shape == alone.shape]
    if alone.ndim == 0:
        if sum(own_rows) != rows:
            return []  # the other workers' parts are not here
        weights = [n / rows for n in own_rows]
        both = zip(weights, parts, strict=True)
        whole = sum((w * part for w, part in both if w), np.zeros_like(alone))
        return [(np.asarray(whole, alone.dtype), alone, other)]
    if not rows or alone.shape[0] % rows:
        return []
    times = alone.shape[0] // rows  # windows, or time steps, of each example
    found = []
    for part, first, count in zip(parts, shards.first_rows, own_rows, strict=True):
        start, stop = int(first) * times, (int(first) + count) * times
        if count and part.shape[1:] == alone.shape[1:] and part.shape[0] == count * times:
            found.append((part, alone[start:stop], other[start:stop]))
    return found


@dataclass
class _Run:
    """What one device has after the steps."""

    values: dict[str, np.ndarray]
    logs: dict[str, np.ndarray]


class _Alone:
    """The model on one device, with plain variables and its own class."""

    def __init__(
        self,
        model: keras.Model,
        variables: Mapping[str, tf.Variable],
        begin: Values,
        seeds: Mapping[str, Any],
        unit: float,
    ) -> None:
        self._model, self._variables, self._begin = model, variables, begin
        self._seeds, self._unit = seeds, unit
        # Keras' weights keep the objects: those that are trained are moved by a last digit.
        of = keras_compat.tf_variable_of
        self._trained = {id(of(v)) for v in model.trainable_variables}

    def compiled(self, step: Any) -> Any:
        """Returns a step as Keras alone compiles it; it is traced with the batch's own shape."""
        if self._model.run_eagerly:
            return step
        return tf.function(recording.marked(step))

    def run(self, step: Any, batches: Sequence[Any], *, by_a_digit: bool = False) -> _Run:
        """Takes the steps from the state at the beginning."""
        self._reset(by_a_digit)
        for batch in batches:
            logs = step(batch)
        values = {name: np.asarray(variable) for name, variable in self._variables.items()}
        return _Run(values, {name: np.asarray(value) for name, value in _flat(logs)})

    def call(self, step: Any, batch: Any, *, by_a_digit: bool = False) -> Any:
        """Returns what one step returns, from the state at the beginning."""
        self._reset(by_a_digit)
        return step(batch)

    def _reset(self, by_a_digit: bool) -> None:
        rng = np.random.default_rng(19)
        for name, variable in self._variables.items():
            value = self._begin[name][0]
            if by_a_digit and id(variable) in self._trained:
                value = comparison.moved_by_a_digit(value, rng, self._unit)
            variable.assign(value)
        begin = self._seeds.get("training")
        if begin is not None:  # the replicas draw by it what one device draws by Keras' own
            keras_compat.seed_generators(self._model)["global"].state.assign(begin.state)


def _flat(logs: Any) -> list[tuple[str, Any]]:
    """Returns a step's logs, which may be nested, by name."""
    if isinstance(logs, Mapping):
        return [
            (f"{name}/{inner}" if inner else str(name), value)
            for name, each in logs.items()
            for inner, value in _flat(each)
        ]
    return [("", logs)] if isinstance(logs, (tf.Tensor, np.generic, float, int)) else []


def _decided(found: Difference) -> Difference:
    """Returns the same, or one that says nothing where the last digits decide about it."""
    explained = found.limit / comparison.TIMES_SENSITIVITY
    size = max(abs(found.here), abs(found.there))
    if found.excess > 1 or not np.isfinite(explained) or explained <= MOST_SENSITIVE * size:
        return found
    return Difference("undecided", found.name, 0.0, found.limit, found.here, found.there)


def _unit_of(model: keras.Model, place: Placement) -> float:
    """Returns the last digit of what the model computes with, where that is less than float32."""
    types = {layer.compute_dtype for layer in keras_compat.layers_of(model)}
    if "bfloat16" in types:
        return 2.0**-8
    short = tf.config.experimental.tensor_float_32_execution_enabled()
    return 2.0**-11 if place.gpus and short else 0.0


def _show_updates(state: relocation.State) -> None:
    """Gives optimizers whose learning rate is 0 another one, so that gradients are seen."""
    for optimizer in state.optimizers:
        with contextlib.suppress(AttributeError, NotImplementedError, TypeError):
            rate = optimizer.learning_rate
            if float(np.asarray(rate)) != 0:
                continue
            if isinstance(rate, keras.Variable):
                rate.assign(VISIBLE_RATE)
                continue
            for step in STEPS_OF_SCHEDULE:
                optimizer.iterations.assign(step)
                if float(np.asarray(optimizer.learning_rate)) != 0:
                    break


Attributes = list[tuple[Any, dict[str, Any]]]


def _attributes(state: relocation.State) -> Attributes:
    """Returns the numbers and texts that objects hold as attributes of Python's."""
    kinds = (int, float, str)
    return [
        (thing, {name: v for name, v in vars(thing).items() if isinstance(v, kinds)})
        for thing in state.objects
    ]


def _set_attributes(attributes: Attributes) -> None:
    """Gives objects back numbers and texts that a step has changed.

    What is True or False stays: layers are built once.
    """
    for thing, before in attributes:
        for name, value in before.items():
            now = vars(thing).get(name)
            if type(now) is type(value) and now != value and not isinstance(value, bool):
                vars(thing)[name] = value


def _random_operations(step: Any) -> tuple[tuple[str, ...], str | None]:
    """Returns the operations of a traced step that draw by TensorFlow's own generators.

    And the line of the step that the first of them comes from, if that is known.
    """
    if not hasattr(step, "get_concrete_function"):
        return (), None
    found: set[str] = set()
    line = None
    for concrete in keras_compat.traces_of(step):
        definition = concrete.graph.as_graph_def(add_shapes=False)
        nodes = [*definition.node]
        for function in definition.library.function:
            nodes += function.node_def
        found |= {node.op for node in nodes if node.op in _DRAWS}
        drawing = [op for op in concrete.graph.get_operations() if op.type in _DRAWS]
        lines = (recording.line_of(op.outputs[0]) for op in drawing if op.outputs)
        line = line or next((each for each in lines if each), None)
    return tuple(sorted(found)), line

"""The first steps on the replicas and on one device, from the same state, and how they differ."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti.distribution.replica_context import metric_variables
from tfmulti.distribution.strategies import Placement, placement_of
from tfmulti.keras_patches.model_structure import is_seed, layers_of, step_replaced
from tfmulti.keras_patches.random_numbers import (
    global_generator,
    step_generator,
    with_global_generator,
)
from tfmulti.keras_patches.variables import tf_variable_of
from tfmulti.training.input.pipeline import from_batch
from tfmulti.training.input.replay import Trial
from tfmulti.training.loop import loops
from tfmulti.training.state import model_checks, relocation, run_state
from tfmulti.training.state.trainer_state import VOTES, state_of
from tfmulti.training.step import local_steps
from tfmulti.training.step import step as steps
from tfmulti.training.verification import comparison, recording
from tfmulti.training.verification.comparison import Difference
from tfmulti.training.verification.plain_run import (
    After,
    PlainRun,
    Values,
    attributes_of,
    flat,
    random_operations,
    set_attributes,
)

# A learning rate of 0, as a warm-up begins with, would hide what the gradients are.
VISIBLE_RATE = 1e-3
STEPS_OF_SCHEDULE = (1, 10, 100, 1000, 10_000)
# By this part of themselves weights are moved for another attempt.
ELSEWHERE = 2.0**-10
# A quantity that a last digit of the weights changes by so much tells nothing.
MOST_SENSITIVE = 0.1
_NOTHING: Sequence[float] = [0.0] * len(VOTES)


class StepComparison:
    """One comparison: the model, the batches, and the state that both runs begin with.

    Attributes:
        steps: how many steps are taken.
        seconds_apart: how long the comparisons took that training does not need itself.
        draws: the operations of the step that draw by TensorFlow's own generators, and the line
            of the first of them.
    """

    def __init__(self, model: keras.Model, trial: Trial) -> None:
        self._model, self._trial = model, trial
        self.place: Placement = placement_of(model.distribute_strategy)
        self.steps = len(trial.batches)
        self.draws: tuple[tuple[str, ...], str | None] = ((), None)
        self.seconds_apart = 0.0
        self._all_was_noted = False
        self._at_once = self.steps if local_steps.steps_at_once(model) > 1 else 1
        self._is_one_execution = not model.run_eagerly and self._at_once == self.steps
        self._device = self.place.gpus[0] if self.place.gpus else "CPU:0"
        self._unit = _unit_of(model, self.place)

    @contextlib.contextmanager
    def state_kept(self) -> Iterator[None]:
        """Inside, steps may be taken; at the end all numbers are what they were, to the bit."""
        model = self._model
        self._python = random.getstate()
        self._trace()
        generators = run_state.random_states()  # what a trace draws, it draws once, as in Keras
        generator = step_generator(model) or global_generator()
        self._roots = [model, *([generator] if generator else [])]
        own = step_generator(model)
        self._drawn_by = None if own is None else keras.ops.convert_to_numpy(own.state)
        self._state = relocation.find(*self._roots)
        originals = relocation.values_of(self._state)
        attributes = attributes_of(self._state)
        try:
            model.reset_metrics()
            _show_updates(self._state)
            self._begin = relocation.values_of(self._state)
            yield
        finally:
            relocation.set_values(self._state, originals)
            if model.run_eagerly:
                set_attributes(attributes)
            if not self._trial.draws:
                run_state.set_random_states(generators)

    def _trace(self) -> None:
        self._model.train_function.trace(self._trial.source(0), self._at_once, _NOTHING)

    def begin_elsewhere(self, number: int) -> None:
        """Has the next steps begin from other weights: those of the beginning, moved a little."""
        self._trial.begin_again()
        of = tf_variable_of
        trained = {id(of(v)) for v in self._model.trainable_variables}
        rng = np.random.default_rng(number)  # on all workers alike
        for name, variable in self._state.named().items():
            if id(variable) in trained:
                moved = comparison.moved_by_digits(self._begin[name][0], rng, ELSEWHERE)
                self._begin[name] = [moved for _ in self._begin[name]]
        relocation.set_values(self._state, self._begin)

    def compare(self) -> tuple[list[Difference], str]:
        """Takes the steps on the replicas and on one device, from the same state.

        Returns all differences, or why one device cannot take the steps. While the replicas
        compute, in a thread, the step of one device is traced: the first needs no Python, and the
        second nothing else.
        """
        begun = time.perf_counter()
        self._trace()
        with ThreadPoolExecutor(1, "tfmulti-verify") as thread:
            on_replicas = thread.submit(self._take_on_replicas)
            if not self._is_one_execution:  # the next one may be traced, as the model is now
                wait([on_replicas])
            runs, problem = self._on_one_device(on_replicas)
            logs, replicas_s = on_replicas.result()
        after = self._after_replicas()
        self.seconds_apart += time.perf_counter() - begun - replicas_s
        if problem or self.draws[0]:  # with other draws, rounding cannot be measured
            return [], problem
        return self._differences(after, logs, *runs), ""

    def _take_on_replicas(self) -> tuple[dict[str, np.ndarray], float]:
        """Takes the steps on the replicas; returns their logs, and the seconds that they took."""
        model, begun = self._model, time.perf_counter()
        for step in range(0, self.steps, self._at_once):
            source = self._trial.source(step)
            outcome = loops.run(model, model.train_function, source, self._at_once, False)
        logs = {name: np.asarray(value) for name, value in flat(outcome.logs)}
        return logs, time.perf_counter() - begun

    def _after_replicas(self) -> Values:
        """Returns all values after the replicas' steps, and puts back those of the beginning."""
        after = relocation.values_of(self._state)
        self._metrics = self._metric_sums(after)
        relocation.set_values(self._state, self._begin)
        return after

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
                parts.append(np.stack(after[names[id(tf_variable_of(v))]]))
        found = {}
        for variable, part in zip(variables, parts, strict=True):
            name = names[id(tf_variable_of(variable))]
            if variable.aggregation == "mean":
                found[name] = part.mean(0, dtype=part.dtype)
            elif variable.aggregation == "only_first_replica":
                found[name] = part[0]
            else:
                found[name] = part.sum(0, dtype=part.dtype)
        return found

    def _on_one_device(self, on_replicas: Future[Any]) -> tuple[list[After], str]:
        """Takes the steps on one device, once the replicas have; or returns why it cannot.

        Twice: as they are, and from weights that are moved by some digits.
        """
        attributes = attributes_of(self._state)
        batches = self._trial.batches
        try:
            with self._alone() as alone:
                step = alone.compiled(steps.step_of(self._model, "train_step"))
                if not self._model.run_eagerly:
                    step.get_concrete_function(batches[0])  # traces, and runs nothing
                wait([on_replicas])  # all memory is for one of them
                runs = [alone.run(step, batches, by_digits=moved) for moved in (False, True)]
                self.draws = random_operations(step)
            return runs, ""
        except Exception as error:
            words = " ".join(str(error).split())
            return [], f"{type(error).__name__}: {words[:400]}"
        finally:
            set_attributes(attributes)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[PlainRun]:
        named = self._state.named()
        with (
            relocation.on_one_device(self._state, self._device) as plain,
            model_checks.as_made(self._model),
            with_global_generator(),
        ):
            if not self._trial.draws:
                random.setstate(self._python)  # a trace may draw by it, as AugMix does
            variables = {name: plain[id(v)] for name, v in named.items()}
            yield PlainRun(self._model, variables, self._begin, self._drawn_by, self._unit)

    def _differences(
        self, after: Values, logs: Mapping[str, np.ndarray], there: After, moved: After
    ) -> list[Difference]:
        kinds = self._kinds()
        found: list[Difference] = []
        for name, copies in after.items():
            kind = kinds.get(name)
            if kind is None:
                continue
            alone, other, before = there.values[name], moved.values[name], self._begin[name][0]
            here = [self._metrics[name]] if kind == "metric" else _distinct(copies)
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
        of = tf_variable_of
        weights = {id(of(v)) for v in model.trainable_variables}
        slots = {id(of(v)) for o in self._state.optimizers for v in o.variables}
        metrics = {id(of(v)) for v in metric_variables(model)}
        seeds = {id(of(v)) for v in self._state.variables if is_seed(v)}
        on_read = {id(of(v)) for v in self._state.variables if v.synchronization == "on_read"}
        for name, variable in self._state.named().items():
            at = id(variable)
            if at in metrics:
                kinds[name] = "metric"
            elif at in on_read:
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
        first = self.first_difference()
        if first is None and failure is not None and failure.kind in ("weight", "slot"):
            first = replace(failure, kind="update") if self._all_was_noted else failure
        first = first or failure
        if first is None:
            return ""
        return comparison.in_words(first, replicas=self.place.replicas, steps=self.steps)

    def first_difference(self) -> Difference | None:
        """Returns where the runs part first, of one step that is traced anew for it.

        Every worker calls it: the replicas' step has collectives. None: it was not found out.
        """
        model, batch = self._model, self._trial.batches[0]
        if state_of(model).options.microbatches > 1:
            return None
        relocation.set_values(self._state, self._begin)
        here: list[recording.Notes] = []
        there: list[recording.Notes] = []
        shards = from_batch(batch, self.place)
        with recording.watched():
            step = steps.step_of(model, "train_step")
            seeds = step_generator(model)
            with step_replaced(model, recording.recorded(step, here.append)):
                one_step = steps.make_step(model, self.place, seeds, None, training=True)
            found, _ = one_step(shards)
            locals_ = [self._of_replica(found, i) for i in range(self.place.local_replicas)]
            relocation.set_values(self._state, self._begin)
            attributes = attributes_of(self._state)
            try:
                with self._alone() as alone:
                    own = steps.step_of(model, "train_step")
                    step = alone.compiled(recording.recorded(own, there.append))
                    values = [np.asarray(v) for v in alone.call(step, batch)]
                    moved = [np.asarray(v) for v in alone.call(step, batch, by_digits=True)]
            except Exception:
                return None
            finally:
                set_attributes(attributes)
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
                return replace(worst, line=there.lines[place])
        self._all_was_noted = any(kind == "gradient" for kind, _, _ in there.keys)
        return None


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


def _distinct(copies: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the values of a variable on each replica, those that are the same only once."""
    first, *others = copies
    return [first, *(each for each in others if not np.array_equal(first, each))]


def _decided(found: Difference) -> Difference:
    """Returns the same, or one that says nothing where the last digits decide about it."""
    explained = found.limit / comparison.TIMES_SENSITIVITY
    size = max(abs(found.here), abs(found.there))
    if found.excess > 1 or not np.isfinite(explained) or explained <= MOST_SENSITIVE * size:
        return found
    return Difference("undecided", found.name, 0.0, found.limit, found.here, found.there)


def _unit_of(model: keras.Model, place: Placement) -> float:
    """Returns the last digit of what the model computes with, where that is less than float32."""
    types = {layer.compute_dtype for layer in layers_of(model)}
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

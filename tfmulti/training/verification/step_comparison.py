"""Takes the first steps on the replicas and on one device, and compares the numbers after them.

Three runs begin with the same state and take the same global batches:

1. The replicas take the steps, with the compiled function of the training.
2. One device takes them as plain Keras does (`plain_run`).
3. One device takes them again, with weights and gradients that are moved by some digits. The
   change of a number tells how much of a difference rounding explains (`comparison`).

After a failure the first step is traced once more on both sides, with notes of what layers, losses
and gradients compute (`recording`). The first note that differs names the place of the error.
"""

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
from tfmulti.training.loop.stop_votes import Votes
from tfmulti.training.state import model_checks, relocation, run_state
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step import step as steps
from tfmulti.training.verification import comparison, recording
from tfmulti.training.verification.comparison import Difference, Quantity
from tfmulti.training.verification.plain_run import (
    After,
    PlainRun,
    Values,
    attributes_of,
    flat,
    random_operations,
    set_attributes,
)

# A learning rate of 0, with which a warm-up may begin, would hide errors of the gradients. This
# rate takes its place.
VISIBLE_RATE = 1e-3
# If a schedule begins with 0, the first of these steps with another rate is used.
STEPS_OF_SCHEDULE = (1, 10, 100, 1000, 10_000)
# Weights are moved by this part of themselves for another attempt.
ELSEWHERE = 2.0**-10
# A quantity tells nothing if the last digits of the weights change it by more than this part of
# itself.
MOST_SENSITIVE = 0.1
# No votes, for executions that are traced.
_NOTHING = Votes()


class StepComparison:
    """The comparison of a model's first steps. Every worker makes one, and calls it alike.

    Args:
        model: the prepared, compiled and built model.
        trial: the first global batches.

    Attributes:
        placement: this process' place among the workers.
        steps: the number of steps that are compared.
        draws: the names of the step's operations that draw from TensorFlow's own generators, and
            the line of the user's step that draws first.
        seconds_apart: the seconds of all comparisons that the training does not need itself.
    """

    def __init__(self, model: keras.Model, trial: Trial) -> None:
        self._model, self._trial = model, trial
        self.placement: Placement = placement_of(model.distribute_strategy)
        self.steps = len(trial.batches)
        self.draws: tuple[tuple[str, ...], str | None] = ((), None)
        self.seconds_apart = 0.0
        self._all_was_noted = False
        self._at_once = self.steps if model.steps_per_execution > 1 else 1
        self._is_one_execution = not model.run_eagerly and self._at_once == self.steps
        self._device = self.placement.gpus[0] if self.placement.gpus else "CPU:0"
        self._unit = _unit_of(model, self.placement)

    @contextlib.contextmanager
    def state_kept(self) -> Iterator[None]:
        """Puts all numbers of the model back when the context ends, to the bit.

        Inside the context `compare` may take steps.
        """
        model = self._model
        self._python = random.getstate()
        self._trace()
        # The trace may have drawn random numbers. Keras draws these once, too, so they are not
        # taken back.
        generators = run_state.random_states()
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
        """Traces the execution that the replicas run next, which builds the layers that it uses."""
        self._model.train_function.trace(self._trial.source(0), self._at_once, _NOTHING)

    def begin_elsewhere(self, number: int) -> None:
        """Lets the next comparison begin from other weights, which are moved a little.

        Args:
            number: the number of the attempt.
        """
        self._trial.begin_again()
        of = tf_variable_of
        trained = {id(of(v)) for v in self._model.trainable_variables}
        # The seed is the same on all workers, so they move the weights alike.
        rng = np.random.default_rng(number)
        for name, variable in self._state.named().items():
            if id(variable) in trained:
                moved = comparison.moved_by_digits(self._begin[name][0], rng, ELSEWHERE)
                self._begin[name] = [moved for _ in self._begin[name]]
        relocation.set_values(self._state, self._begin)

    def compare(self) -> tuple[list[Difference], str]:
        """Takes the steps on the replicas and on one device, and compares the numbers.

        The replicas compute in a thread, which needs no Python. Meanwhile the step of one device is
        traced, which needs Python only.

        Returns:
            All differences, and an empty text. If one device cannot take the steps, it is no
            difference, and the reason.
        """
        begun = time.perf_counter()
        self._trace()
        with ThreadPoolExecutor(1, "tfmulti-verify") as thread:
            on_replicas = thread.submit(self._take_on_replicas)
            # A later execution may be traced in the thread. The model must not be on one device
            # at that time.
            if not self._is_one_execution:
                wait([on_replicas])
            runs, problem = self._on_one_device(on_replicas)
            logs, replicas_s = on_replicas.result()
        after = self._after_replicas()
        self.seconds_apart += time.perf_counter() - begun - replicas_s
        # If the two sides draw different random numbers, the effect of rounding cannot be measured.
        if problem or self.draws[0]:
            return [], problem
        return self._differences(after, logs, *runs), ""

    def _take_on_replicas(self) -> tuple[dict[str, np.ndarray], float]:
        """Takes the steps on the replicas, and returns the logs and the seconds that they took."""
        model, begun = self._model, time.perf_counter()
        for step in range(0, self.steps, self._at_once):
            source = self._trial.source(step)
            votes = loops.votes_of(model, stop=False)
            result = loops.run(model, model.train_function, source, self._at_once, votes)
        logs = {name: np.asarray(value) for name, value in flat(result.logs)}
        return logs, time.perf_counter() - begun

    def _after_replicas(self) -> Values:
        """Returns all values after the replicas' steps, and restores those of the beginning."""
        after = relocation.values_of(self._state)
        self._metrics = self._metric_sums(after)
        relocation.set_values(self._state, self._begin)
        return after

    def _metric_sums(self, after: Values) -> dict[str, np.ndarray]:
        """Returns the metrics' variables merged over all replicas, by name."""
        names = {id(variable): name for name, variable in self._state.named().items()}
        variables = metric_variables(self._model)
        if self.placement.workers > 1:
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
        """Takes the steps on one device twice: as they are, and with moved weights and gradients.

        The steps begin when the replicas have ended.

        Returns:
            The numbers after both runs, and an empty text; or nothing, and the reason.
        """
        attributes = attributes_of(self._state)
        batches = self._trial.batches
        try:
            with self._alone() as alone:
                step = alone.compiled(steps.step_of(self._model, "train_step"))
                if not self._model.run_eagerly:
                    # This traces the step and runs nothing.
                    step.get_concrete_function(batches[0])
                # The two sides run one after the other, so that each has all of the memory.
                wait([on_replicas])
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
        """Gives the model on one device, with plain variables, inside the context."""
        named = self._state.named()
        with (
            relocation.on_one_device(self._state, self._device) as plain,
            model_checks.as_made(self._model),
            with_global_generator(),
        ):
            # A layer of the user's own may draw from Python's generator when it is traced. Both
            # traces must draw alike.
            if not self._trial.draws:
                random.setstate(self._python)
            variables = {name: plain[id(v)] for name, v in named.items()}
            yield PlainRun(self._model, variables, self._begin, self._drawn_by, self._unit)

    def _differences(
        self, after: Values, logs: Mapping[str, np.ndarray], there: After, moved: After
    ) -> list[Difference]:
        """Returns how far each variable and each log of the replicas is from one device's."""
        kinds = self._kinds()
        found: list[Difference] = []
        for name, copies in after.items():
            kind = kinds.get(name)
            if kind is None:
                continue
            alone, other, before = there.values[name], moved.values[name], self._begin[name][0]
            here = [self._metrics[name]] if kind == "metric" else _distinct(copies)
            each = [
                comparison.compare(Quantity(kind, name), value, alone, other, before, self._unit)
                for value in here
                if value.dtype.kind not in "SUO"
            ]
            found += [max(each, key=lambda d: d.excess)] if each else []
        for name, value in logs.items():
            if name in there.logs and name in moved.logs:
                alone, other = there.logs[name], moved.logs[name]
                alone = alone.astype(value.dtype)
                log = Quantity("log", name)
                found.append(comparison.compare(log, value, alone, other, None, self._unit))
        return [_decided(d) for d in found]

    def _kinds(self) -> dict[str, str]:
        """Returns the kind of each variable by name, without those that cannot be compared."""
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
        """Returns the message of a comparison that failed on some worker.

        Every worker calls it, because finding the first difference takes collectives.

        Args:
            failure: the difference that this worker would report, or None.
        """
        if self.draws[0]:
            return comparison.draws_in_words(*self.draws)
        first = self.first_difference()
        if first is None and failure is not None and failure.kind in ("weight", "slot"):
            first = replace(failure, kind="update") if self._all_was_noted else failure
        first = first or failure
        if first is None:
            return ""
        unknown = next(iter(state_of(self._model).traced.unknown), None)
        return comparison.in_words(
            first, replicas=self.placement.replicas, steps=self.steps, unknown=unknown
        )

    def first_difference(self) -> Difference | None:
        """Returns the first difference within the first step, or None if it was not found.

        The step is traced once more for this. Every worker calls it, because the replicas' step has
        collectives.
        """
        model, batch = self._model, self._trial.batches[0]
        if state_of(model).options.microbatches > 1:
            return None
        relocation.set_values(self._state, self._begin)
        here: list[recording.Notes] = []
        there: list[recording.Notes] = []
        worker_batch = from_batch(batch, self.placement)
        with recording.watched():
            step = steps.step_of(model, "train_step")
            seeds = step_generator(model)
            with step_replaced(model, recording.recorded(step, here.append)):
                one_step = steps.make_step(model, self.placement, seeds, None, training=True)
            found, _ = one_step(worker_batch)
            locals_ = [self._of_replica(found, i) for i in range(self.placement.local_replicas)]
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
        return self._first_note(worker_batch, here, locals_, there[0], values, moved)

    def _of_replica(self, found: Any, local: int) -> list[np.ndarray]:
        """Returns the notes' values on one local replica."""
        strategy = self._model.distribute_strategy
        return [np.asarray(strategy.experimental_local_results(value)[local]) for value in found]

    def _first_note(
        self,
        worker_batch: Any,
        here: Sequence[recording.Notes],
        locals_: Sequence[Sequence[np.ndarray]],
        there: recording.Notes,
        values: Sequence[np.ndarray],
        moved: Sequence[np.ndarray],
    ) -> Difference | None:
        """Returns the first note that differs, or None. Rows are compared with the same rows."""
        if not here:
            return None
        at = {key: position for position, key in enumerate(here[0].keys)}
        rows = int(worker_batch.rows)
        for position, key in enumerate(there.keys):
            if key not in at:
                continue
            worst: Difference | None = None
            parts = [local[at[key]] for local in locals_]
            pairs = _pairs(key[0], parts, values[position], moved[position], worker_batch, rows)
            for mine, alone, other in pairs:
                one = comparison.compare(Quantity(*key[:2]), mine, alone, other, None, self._unit)
                if one.limit == 0 and key[0] == "layer" and not alone.size:
                    continue
                if worst is None or one.excess > worst.excess:
                    worst = one
            # The rounding of an output is relative to the terms of its sum, which are unknown. So a
            # difference must be ten times above the limit.
            if worst is not None and worst.difference > 10 * worst.limit:
                return replace(worst, line=there.lines[position])
        self._all_was_noted = any(kind == "gradient" for kind, _, _ in there.keys)
        return None


def _pairs(
    kind: str,
    parts: Sequence[np.ndarray],
    alone: np.ndarray,
    other: np.ndarray,
    worker_batch: Any,
    rows: int,
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Returns the parts of a note that are compared: replicas, one device, one device moved.

    A gradient is the same on all replicas. A scalar is the mean over the replicas by their rows.
    Anything else is cut to the rows of each replica.
    """
    own_rows = [int(n) for n in worker_batch.own_rows]
    if kind == "gradient":
        return [(part, alone, other) for part in parts if part.shape == alone.shape]
    if alone.ndim == 0:
        # The parts of the other workers are not here.
        if sum(own_rows) != rows:
            return []
        weights = [n / rows for n in own_rows]
        both = zip(weights, parts, strict=True)
        whole = sum((w * part for w, part in both if w), np.zeros_like(alone))
        return [(np.asarray(whole, alone.dtype), alone, other)]
    if not rows or alone.shape[0] % rows:
        return []
    # An example may have several entries, such as windows or time steps.
    times = alone.shape[0] // rows
    found = []
    for part, first, count in zip(parts, worker_batch.first_rows, own_rows, strict=True):
        start, stop = int(first) * times, (int(first) + count) * times
        if count and part.shape[1:] == alone.shape[1:] and part.shape[0] == count * times:
            found.append((part, alone[start:stop], other[start:stop]))
    return found


def _distinct(copies: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the first replica's value of a variable, and the values that differ from it."""
    first, *others = copies
    return [first, *(each for each in others if not np.array_equal(first, each))]


def _decided(found: Difference) -> Difference:
    """Returns the same difference, or an undecided one if the last digits decide about it."""
    explained = found.limit / comparison.TIMES_SENSITIVITY
    size = max(abs(found.here), abs(found.there))
    if found.excess > 1 or not np.isfinite(explained) or explained <= MOST_SENSITIVE * size:
        return found
    return Difference("undecided", found.name, 0.0, found.limit, found.here, found.there)


def _unit_of(model: keras.Model, placement: Placement) -> float:
    """Returns the last digit with which the model computes, or 0 if that is float32 or more."""
    types = {layer.compute_dtype for layer in layers_of(model)}
    if "bfloat16" in types:
        return 2.0**-8
    # GPUs may multiply float32 numbers as TensorFloat-32, which has fewer digits.
    short = tf.config.experimental.tensor_float_32_execution_enabled()
    return 2.0**-11 if placement.gpus and short else 0.0


def _show_updates(state: relocation.State) -> None:
    """Gives each optimizer whose learning rate is 0 another rate or a later step of a schedule."""
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

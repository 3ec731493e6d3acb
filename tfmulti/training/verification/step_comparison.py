"""Takes the first steps on the replicas and on one device, and compares the numbers after them.

Three runs begin with the same state and take the same global batches:

1. The replicas take the steps, with the compiled function of the training.
2. One device takes them as plain Keras does (`plain_run`).
3. One device takes them again, with perturbed weights and gradients. The effect on a number tells
   how much of a difference rounding explains (`comparison`).

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

from tfmulti.distribution import python_attributes
from tfmulti.distribution.replica_context import metric_variables
from tfmulti.distribution.strategies import Placement, placement_of
from tfmulti.errors import ModelError
from tfmulti.keras_patches.model_structure import is_seed, layers_of, step_replaced
from tfmulti.keras_patches.random_numbers import (
    global_generator,
    step_generator,
    with_global_generator,
)
from tfmulti.keras_patches.variables import array_of, tf_variable_of
from tfmulti.launch.policy import describe_error
from tfmulti.training.input.pipeline import from_batch
from tfmulti.training.input.replay import BatchTrial, Trial
from tfmulti.training.input.worker_batch import WorkerBatch
from tfmulti.training.loop import loops
from tfmulti.training.loop.stop_votes import Votes
from tfmulti.training.state import model_checks, model_search, relocation, run_state
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step import step as steps
from tfmulti.training.verification import comparison, recording
from tfmulti.training.verification.comparison import Difference, Quantity
from tfmulti.training.verification.plain_run import (
    PlainResult,
    PlainRun,
    Values,
    flat,
    random_operations,
)

# A learning rate of 0, with which a warm-up may begin, would hide errors of the gradients. This
# rate takes its place.
VISIBLE_RATE = 1e-3
# If a schedule begins with 0, the first of these steps with another rate is used.
STEPS_OF_SCHEDULE = (1, 10, 100, 1000, 10_000)
# For another attempt, each weight is changed by this part of itself.
ELSEWHERE = 2.0**-10
# A quantity tells nothing if one unit in the last place of the weights changes it by more than this
# part of itself.
MOST_SENSITIVE = 0.1


class StepComparison:
    """The comparison of a model's first steps. Every worker makes one, and calls it alike.

    Attributes:
        placement: this process' place among the workers.
        steps: the number of steps that are compared.
        draws: the names of the step's operations that draw from TensorFlow's own generators, and
            the line of the user's step that draws first.
        seconds_apart: the seconds of all comparisons that the training does not need itself.
    """

    def __init__(self, model: keras.Model, trial: Trial | BatchTrial) -> None:
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
        self._attributes = python_attributes.read(model_search.find(model).objects)
        self._trace()
        # The trace may have drawn random numbers. Keras draws these once, too, so the generators
        # keep their present states.
        generators = run_state.random_states()
        seeds = step_generator(model)
        self._drawn_by = None if seeds is None else keras.ops.convert_to_numpy(seeds.state)
        self._state = model_search.find(model, seeds or global_generator())
        originals = relocation.values_of(self._state)
        try:
            model.reset_metrics()
            _avoid_zero_rates(self._state)
            self._begin = relocation.values_of(self._state)
            # A replica has a part of a metric's state, which `reset_state` may set to any value.
            sums = self._metric_sums(self._begin)
            self._begin_of_metrics = {name: [value] for name, value in sums.items()}
            yield
        finally:
            relocation.set_values(self._state, originals)
            if model.run_eagerly:
                python_attributes.restore(self._attributes)
            if not self._trial.runs_user_code:
                run_state.set_random_states(generators)

    def _trace(self) -> None:
        """Traces the execution that the replicas run next, which builds the layers that it uses."""
        self._model.train_function.trace(self._trial.source(0), self._at_once, Votes())

    def begin_elsewhere(self, number: int) -> None:
        """Lets the next comparison begin from other weights, which are near the first ones."""
        self._trial.begin_again()
        trained = {id(tf_variable_of(v)) for v in self._model.trainable_variables}
        # The seed is the same on all workers, so all of them get the same weights.
        rng = np.random.default_rng(number)
        for name, variable in self._state.named().items():
            if id(variable) in trained:
                perturbed = comparison.perturbed(self._begin[name][0], rng, ELSEWHERE)
                self._begin[name] = [perturbed for _ in self._begin[name]]
        relocation.set_values(self._state, self._begin)

    def compare(self) -> tuple[list[Difference], str]:
        """Takes the steps on the replicas and on one device, and compares the numbers.

        The replicas compute in a thread, which needs no Python. Meanwhile the step of one device is
        traced, which needs Python only, and its graph is optimized.

        Returns:
            All differences, and an empty text. If one device cannot take the steps, it is no
            difference, and the reason.
        """
        begun = time.perf_counter()
        if self._model.run_eagerly:
            python_attributes.restore(self._attributes)
        self._trace()
        with ThreadPoolExecutor(1, "tfmulti-verify") as thread:
            on_replicas = thread.submit(self._take_on_replicas)
            # A later execution may be traced in the thread. The model must not be on one device
            # at that time.
            if not self._is_one_execution:
                wait([on_replicas])
            runs, problem = self._on_one_device(on_replicas)
            logs, replicas_s = self._result_of(on_replicas, may_be_alone=bool(runs))
        after = self._after_replicas()
        clipped = [self.first_difference(("gradient",))] if self._clips() else []
        self.seconds_apart += time.perf_counter() - begun - replicas_s
        # If the two sides draw different random numbers, the effect of rounding cannot be measured.
        if problem or self.draws[0]:
            return [], problem
        return [*self._differences(after, logs, *runs), *filter(None, clipped)], ""

    def _clips(self) -> bool:
        """Returns whether an optimizer clips by a norm.

        A gradient that is wrong by a factor may then give the right weights and slots.
        """
        names = ("clipnorm", "global_clipnorm")
        optimizers = model_checks.with_inner_optimizers(self._model)
        return any(getattr(optimizer, name, None) for optimizer in optimizers for name in names)

    def _take_on_replicas(self) -> tuple[dict[str, np.ndarray], float]:
        """Takes the steps on the replicas, and returns the logs and the seconds that they took."""
        model, begun = self._model, time.perf_counter()
        for step in range(0, self.steps, self._at_once):
            source = self._trial.source(step)
            votes = loops.votes_of(model, stop=False)
            result = loops.run(model, model.train_function, source, self._at_once, votes)
        logs = {name: array_of(value) for name, value in flat(result.logs)}
        return logs, time.perf_counter() - begun

    def _result_of(self, on_replicas: Future[Any], *, may_be_alone: bool) -> Any:
        """Returns what `_take_on_replicas` does, once it has ended.

        Args:
            on_replicas: the call.
            may_be_alone: whether one device could take the steps.

        Raises:
            ModelError: one device can take the steps, and a replica cannot, by its own rows.
        """
        try:
            return on_replicas.result()
        except tf.errors.InvalidArgumentError as error:
            if not may_be_alone:
                raise
            reason = describe_error(type(error).__name__, str(error))
            raise ModelError(
                "one device can take the first step, and a replica cannot take it with its own "
                f"rows ({reason}). A layer or a loss needs all rows of the batch "
                "together, or a fixed number of them. Compute each row by itself, take the number "
                "of rows from keras.ops.shape(x)[0], or train on one device."
            ) from error

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
            states = list(run_state.metric_states(self._model, variables).values())
        else:
            states = [np.stack(after[names[id(tf_variable_of(v))]]) for v in variables]
        return {
            names[id(tf_variable_of(variable))]: run_state.merged(state, variable)
            for variable, state in zip(variables, states, strict=True)
        }

    def _on_one_device(self, on_replicas: Future[Any]) -> tuple[list[PlainResult], str]:
        """Takes the steps on one device twice: as they are, and perturbed.

        The steps begin when the replicas have ended.

        Returns:
            The numbers after both runs, and an empty text; or nothing, and the reason.
        """
        batches = self._trial.batches
        try:
            with python_attributes.kept(self._state.objects), self._alone() as alone:
                step = alone.compiled(steps.step_of(self._model, "train_step"))
                if not self._model.run_eagerly:
                    # A GPU chooses its algorithms anew for each number of rows, which takes time.
                    alone.trace(step, batches[0], may_run=not self.placement.gpus)
                # The two sides run one after the other, so that each has all of the memory.
                wait([on_replicas])
                runs = [alone.run(step, batches, is_perturbed=p) for p in (False, True)]
                self.draws = random_operations(step)
            return runs, ""
        except Exception as error:
            words = " ".join(str(error).split())
            return [], f"{type(error).__name__}: {words[:400]}"

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
            if not self._trial.runs_user_code:
                random.setstate(self._python)
            variables = {name: plain[id(v)] for name, v in named.items()}
            begin = self._begin_of_one_device()
            yield PlainRun(
                self._model, variables, begin, self._attributes, self._drawn_by, self._unit
            )

    def _begin_of_one_device(self) -> Values:
        """Returns the values from which one device begins, with whole states of the metrics."""
        return {**self._begin, **self._begin_of_metrics}

    def _differences(
        self,
        after: Values,
        logs: Mapping[str, np.ndarray],
        plain: PlainResult,
        perturbed: PlainResult,
    ) -> list[Difference]:
        """Returns how far each variable and each log of the replicas is from one device's."""
        differences: list[Difference] = []
        kinds, begin = self._kinds(), self._begin_of_one_device()
        for name, values in after.items():
            kind = kinds.get(name)
            if kind is None:
                continue
            copies = [self._metrics[name]] if kind == "metric" else _distinct(values)
            device = plain.values[name], perturbed.values[name]
            of_copies = [
                comparison.compare(Quantity(kind, name), value, *device, begin[name][0], self._unit)
                for value in copies
                if value.dtype.kind not in "SUO"
            ]
            differences += [max(of_copies, key=lambda d: d.excess)] if of_copies else []
        for name, value in logs.items():
            if name in plain.logs and name in perturbed.logs:
                device = plain.logs[name].astype(value.dtype), perturbed.logs[name]
                log = Quantity("log", name)
                differences.append(comparison.compare(log, value, *device, None, self._unit))
        times = comparison.times_sensitivity(self._unit)
        return [_decided(difference, times) for difference in differences]

    def _kinds(self) -> dict[str, str]:
        """Returns the kind of each variable by name, without those that cannot be compared."""
        variables = self._state.variables
        by_kind = {
            "metric": metric_variables(self._model),
            "": [v for v in variables if v.synchronization == "on_read"],
            "seed": filter(is_seed, variables),
            "weight": self._model.trainable_variables,
            "slot": [v for o in self._state.optimizers for v in o.variables],
        }
        kind_of: dict[int, str] = {}
        # A variable has the first of these kinds under which it is listed. The kind "" is for
        # variables that cannot be compared.
        for kind, members in by_kind.items():
            for variable in members:
                kind_of.setdefault(id(tf_variable_of(variable)), kind)
        kinds = {n: kind_of.get(id(v), "state") for n, v in self._state.named().items()}
        return {name: kind for name, kind in kinds.items() if kind}

    def difference_in_words(self, failure: Difference | None) -> str:
        """Returns the message of a comparison that failed on some worker.

        Every worker calls it, because finding the first difference takes collectives.
        """
        if self.draws[0]:
            return comparison.draws_in_words(*self.draws)
        first = self.first_difference()
        if first is None and failure is not None and failure.kind in ("weight", "slot"):
            first = replace(failure, kind="update") if self._all_was_noted else failure
        first = first or failure
        if first is None:
            return ""
        unknown = next(iter(state_of(self._model).traced.unknown.get("train_step", {})), None)
        if self._model.run_eagerly and self.placement.replicas > 1:
            unknown = comparison.EAGER_MODE
        return comparison.in_words(
            first, replicas=self.placement.replicas, steps=self.steps, unknown=unknown
        )

    def first_difference(self, kinds: Sequence[str] = recording.KINDS) -> Difference | None:
        """Returns the first difference within the first step, or None if it was not found.

        The step is traced once more for this. Every worker calls it, because the replicas' step has
        collectives.

        Args:
            kinds: the kinds of the notes that are compared.
        """
        model, batch = self._model, self._trial.batches[0]
        if state_of(model).options.microbatches > 1:
            return None
        relocation.set_values(self._state, self._begin)
        replicas_notes: list[recording.Notes] = []
        device_notes: list[recording.Notes] = []
        worker_batch = from_batch(batch, self.placement)
        with recording.noting():
            step = steps.step_of(model, "train_step")
            seeds = step_generator(model)
            with step_replaced(model, recording.returning_notes(step, replicas_notes.append)):
                one_step = steps.make_step(model, seeds, None, training=True)
            python_attributes.restore(self._attributes)
            if not self._trial.runs_user_code:
                # The trace on one device begins with the same state of Python's generator.
                random.setstate(self._python)
            noted, _ = one_step(worker_batch)
            of_replicas = [self._of_replica(noted, i) for i in range(self.placement.local_replicas)]
            relocation.set_values(self._state, self._begin)
            try:
                with python_attributes.kept(self._state.objects), self._alone() as alone:
                    step = steps.step_of(model, "train_step")
                    step = alone.compiled(recording.returning_notes(step, device_notes.append))
                    plain, perturbed = (
                        [array_of(v) for v in alone.call(step, batch, is_perturbed=p)]
                        for p in (False, True)
                    )
            except Exception:
                return None
        if not replicas_notes:
            return None
        indices = {key: index for index, key in enumerate(replicas_notes[0].keys)}
        for position, key in enumerate(device_notes[0].keys):
            kind, name, _ = key
            if key not in indices or kind not in kinds:
                continue
            parts = [values[indices[key]] for values in of_replicas]
            device = plain[position], perturbed[position]
            differences = [
                comparison.compare(Quantity(kind, name), *values, None, self._unit)
                for values in _comparable(kind, parts, *device, worker_batch)
            ]
            largest = max(differences, key=lambda d: d.excess, default=None)
            # The rounding of an output is relative to the terms of its sum, which are unknown. So a
            # difference must be ten times above the limit.
            if largest is not None and largest.difference > 10 * largest.limit:
                return replace(largest, line=device_notes[0].lines[position])
        self._all_was_noted = any(kind == "gradient" for kind, _, _ in device_notes[0].keys)
        return None

    def _of_replica(self, noted: Any, local: int) -> list[np.ndarray]:
        """Returns the notes' values on one local replica."""
        strategy = self._model.distribute_strategy
        return [array_of(strategy.experimental_local_results(value)[local]) for value in noted]


def _comparable(
    kind: str,
    parts: Sequence[np.ndarray],
    plain: np.ndarray,
    perturbed: np.ndarray,
    worker_batch: WorkerBatch,
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Returns the values of a note to compare: of replicas, of one device, and perturbed.

    A gradient is the same on all replicas. A scalar is the mean over the replicas by their rows.
    Anything else is cut to the rows of each replica.
    """
    rows, own_rows = int(worker_batch.rows), [int(n) for n in worker_batch.own_rows]
    if kind == "gradient":
        return [(part, plain, perturbed) for part in parts if part.shape == plain.shape]
    if plain.ndim == 0:
        # The parts of the other workers are not here.
        if sum(own_rows) != rows:
            return []
        weighted = [n / rows * part for n, part in zip(own_rows, parts, strict=True) if n]
        mean = sum(weighted, np.zeros_like(plain))
        return [(np.asarray(mean, plain.dtype), plain, perturbed)]
    if not rows or plain.shape[0] % rows:
        return []
    # An example may have several entries, such as windows or time steps.
    times = plain.shape[0] // rows
    values = []
    for part, first_row, count in zip(parts, worker_batch.first_rows, own_rows, strict=True):
        start, stop = int(first_row) * times, (int(first_row) + count) * times
        if count and part.shape[1:] == plain.shape[1:] and part.shape[0] == count * times:
            values.append((part, plain[start:stop], perturbed[start:stop]))
    return values


def _distinct(copies: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the first replica's value of a variable, and the values that differ from it."""
    first, *others = copies
    return [first, *(other for other in others if not np.array_equal(first, other))]


def _decided(difference: Difference, times: int) -> Difference:
    """Returns the same difference, or an undecided one if the perturbation changes too much.

    Args:
        difference: the difference.
        times: the limit divided by the effect of the perturbation.
    """
    effect = difference.limit / times
    size = max(abs(difference.on_replicas), abs(difference.on_one_device))
    is_clear = not np.isfinite(effect) or effect <= MOST_SENSITIVE * size
    if difference.excess > 1 or is_clear:
        return difference
    return replace(difference, kind="undecided", difference=0.0)


def _unit_of(model: keras.Model, placement: Placement) -> float:
    """Returns the last digit with which the model computes, or 0 if that is float32 or more."""
    types = {layer.compute_dtype for layer in layers_of(model)}
    if "bfloat16" in types:
        return 2.0**-8
    # GPUs may multiply float32 numbers as TensorFloat-32, which has fewer digits.
    short = tf.config.experimental.tensor_float_32_execution_enabled()
    return 2.0**-11 if placement.gpus and short else 0.0


def _avoid_zero_rates(state: model_search.State) -> None:
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

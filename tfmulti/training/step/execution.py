"""Compiles the function that `fit` and `evaluate` call for each execution.

An execution runs one or several steps and returns their results over all replicas. One collective
sums all metrics together. The source may yield global batches. Then each step keeps this worker's
rows as a `WorkerBatch`, with one replica slice for each local replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfmulti.distribution import connections
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import ModelError
from tfmulti.keras_patches import installation
from tfmulti.keras_patches.random_numbers import step_generator
from tfmulti.keras_patches.tracing import optimized_once
from tfmulti.launch.heartbeat import heartbeat
from tfmulti.training.input.worker_batch import (
    Ahead,
    WorkerBatch,
    on_devices,
    with_any_rows,
)
from tfmulti.training.state import model_checks, run_state
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step import whole_batch
from tfmulti.training.step.step import (
    make_step,
    next_batch,
    taking_agreed_rows,
    warn_of_addends,
    warn_of_unknown,
    without_autograph,
)
from tfmulti.training.step.step_logs import StepLogs
from tfmulti.training.step.step_result import StepResult, Summary, Totals, time_of


class Execution:
    """A compiled function of training or evaluation: `execution(source, steps, votes)`.

    A call runs `steps` steps from a queue or an iterator of global batches. It can also run one
    step on a `WorkerBatch` or an Optional of a batch. It returns a `StepResult`. `votes` are the
    votes of this worker.

    An iterator must have as many batches as there are steps. A step without a batch would still
    draw seeds and increase the step counter, because these need no data.

    Args:
        model: the prepared and compiled model.
        training: whether the steps are `train_step` or `test_step`.

    Attributes:
        one: the function of one step, with a source and votes as arguments.
        several: the function of several steps, with an iterator, the number of steps, and votes.
        one_and_next: the function of one step that copies the next batch meanwhile (`Ahead`), with
            a queue, a `WorkerBatch` and votes.
        compiled_steps: the `steps_per_execution` of the model when the function was made.
        is_verified: whether the first steps were compared with one device, or need no comparison
            (`verification`).
    """

    def __init__(self, model: keras.Model, *, training: bool) -> None:
        self.is_verified = False
        self.compiled_steps = int(model.steps_per_execution)
        # A source, and the concrete function that was traced for it.
        self._traced: tuple[Any, Any] | None = None
        self._name = "train_step" if training else "test_step"
        installation.install()
        self._seeds = step_generator(model)
        self._model, self._state = model, state_of(model)
        whole_batch.begin(model, self._name)
        self._placement = placement = placement_of(model.distribute_strategy)
        self._logs = StepLogs(model)
        self._summary = Summary(model, self._logs, training=training)
        next_agreed_batch = taking_agreed_rows(model)
        self._take = next_agreed_batch or self._next_batch
        # The collective of `next_agreed_batch` must not run at the same time as the collectives of
        # another step. So with this function no batch is taken ahead.
        compiles = not model.run_eagerly
        self._goes_ahead = compiles and next_agreed_batch is None and model.steps_per_execution == 1
        self._may_gather = compiles and placement.replicas > 1
        self._first = without_autograph(
            lambda queue: on_devices(self._next_batch(queue), placement.gpus)
        )
        self._compile()

    def _compile(self) -> None:
        """Makes new compiled functions."""
        self._state.traced.values.pop(self._name, None)
        training = self._name == "train_step"
        self._step = make_step(self._model, self._seeds, self._logs, training=training)
        self.one: Any = self._one
        self.several: Any = self._several
        if not self._model.run_eagerly:
            self.one = without_autograph(self._one)
            self.several = without_autograph(self._several)
        self.one_and_next = without_autograph(self._one_and_next)

    def __call__(self, source: Any, steps: int = 0, votes: Sequence[int] = ()) -> StepResult:
        if not steps:
            name = self._name.replace("step", "function")
            raise ModelError(
                f"the {name} of a prepared model is called by fit and evaluate alone. Call "
                "model.train_on_batch or model.test_on_batch for a batch of your own."
            )
        with connections.own_errors(self._placement), optimized_once():
            self._build_optimizer()
            result = whole_batch.with_new_functions(
                lambda: self._call(source, steps, votes), self._compile
            )
        warn_of_unknown(self._model, self._name)
        warn_of_addends(self._model, self._name, result.rows, steps)
        return result

    def _build_optimizer(self) -> None:
        """Builds the optimizer of Keras' own train_step before it is first traced."""
        if self._name == "train_step":
            model_checks.build_optimizer(self._model)

    def _call(self, source: Any, steps: int, votes: Sequence[int]) -> StepResult:
        """Runs the compiled function that fits the source and the number of steps."""
        vote = tf.constant(votes, tf.float32)
        if isinstance(source, Ahead):
            if self._goes_ahead:
                return self._ahead(source, vote)
            source = source.queue
        function, inputs = self._function_for(source, steps, vote)
        result: StepResult
        traced = self._traced_for(source)
        if traced is not None:
            result = traced(*inputs)
            return result
        if self._state.saved_variables and not self._model.run_eagerly:
            self._build_by(function, *inputs)
        if steps > 1 and self._may_gather:
            if function.experimental_get_tracing_count() == 0:
                # Tracing shows whether the steps gather rows. A collective inside a function has
                # one shape in each call, so batches of different sizes need separate calls.
                function.get_concrete_function(*inputs)
            if self._name in self._state.traced.gathers:
                return self._one_by_one(source, steps, vote)
        result = function(*inputs)
        return result

    def _function_for(self, source: Any, steps: int, vote: tf.Tensor) -> tuple[Any, list[Any]]:
        """Returns the function that runs a number of steps, and its inputs."""
        if steps == 1:
            return self.one, [source, vote]
        return self.several, [source, tf.constant(steps), vote]

    def trace(self, source: Any, steps: int, votes: Sequence[int]) -> None:
        """Traces an execution without running it, and so builds the layers that its steps use.

        If the next call has the same source, it uses the traced function. It is not traced again,
        even if the call comes from another thread or scope.
        """
        if self._model.run_eagerly:
            return
        self._build_optimizer()
        vote = tf.constant(votes, tf.float32)
        if isinstance(source, Ahead) and self._goes_ahead:
            source.held = self._first(source.queue) if source.held is None else source.held
            held = with_any_rows(source.held)
            concrete = self.one_and_next.get_concrete_function(source.queue, held, vote)
            self._traced = source.queue, concrete
            return
        source = source.queue if isinstance(source, Ahead) else source
        function, inputs = self._function_for(source, steps, vote)
        self._traced = source, function.get_concrete_function(*inputs)

    def _traced_for(self, source: Any) -> Any:
        """Returns the function that `trace` made for this source, once, or None."""
        traced, self._traced = self._traced, None
        return traced[1] if traced is not None and traced[0] is source else None

    def _next_batch(self, source: Any) -> WorkerBatch:
        """Returns the next batch of a source."""
        return next_batch(source, self._placement)

    def _one(self, source: Any, votes: tf.Tensor) -> StepResult:
        """Runs one step."""
        report_trace()
        before = self._summary.before()
        # The time that the step waits for data is measured from here.
        totals = Totals.nothing(self._placement)
        batch = self._take(source)
        totals = totals.counted(batch).waited_for(time_of(batch))
        return self._summary.after(batch, self._step(batch), votes, before, totals)

    def _one_and_next(
        self, source: Any, batch: WorkerBatch, votes: tf.Tensor
    ) -> tuple[StepResult, WorkerBatch]:
        """Runs a step on a batch that is on the GPUs, and copies the next one there meanwhile."""
        report_trace()
        before = self._summary.before()
        totals = Totals.nothing(self._placement).counted(batch)
        upcoming = on_devices(self._next_batch(source), self._placement.gpus)
        results = self._step(batch)
        totals = totals.after(results).waited_for(time_of(upcoming))
        return self._summary.after(batch, results, votes, before, totals), upcoming

    def _several(self, iterator: Any, steps: tf.Tensor, votes: tf.Tensor) -> StepResult:
        """Runs all steps but the last in a loop, and then the last one, whose logs it returns."""
        report_trace()
        before = self._summary.before()
        totals = Totals.nothing(self._placement)

        def step(number: tf.Tensor, totals: Totals) -> tuple[tf.Tensor, Totals]:
            batch = self._take(iterator)
            totals = totals.counted(batch).waited_for(time_of(batch))
            return number + 1, totals.after(self._step(batch))

        before_last = steps - 1
        _, totals = tf.while_loop(
            lambda number, _: number < before_last, step, (0, totals), parallel_iterations=1
        )
        batch = self._take(iterator)
        totals = totals.counted(batch).waited_for(time_of(batch))
        return self._summary.after(batch, self._step(batch), votes, before, totals)

    def _one_by_one(self, source: Any, steps: int, vote: tf.Tensor) -> StepResult:
        """Runs several steps by one call each."""
        results = [self.one(source, vote) for _ in range(steps)]
        summed = ("rows", "lost", "waits_s")
        sums = {name: tf.add_n([getattr(result, name) for result in results]) for name in summed}
        last: StepResult = results[-1]
        return last._replace(**sums)

    def _ahead(self, ahead: Ahead, vote: tf.Tensor) -> StepResult:
        """Runs a step on the batch that `ahead` holds, and lets it hold the next one."""
        ahead.held = held = self._first(ahead.queue) if ahead.held is None else ahead.held
        if self.one_and_next.experimental_get_tracing_count() == 0:
            # This trace is for any number of rows, so the last batch needs no trace of its own.
            self.one_and_next.get_concrete_function(ahead.queue, with_any_rows(held), vote)
            run_state.restore_late(self._model)
        result: StepResult
        run = self._traced_for(ahead.queue) or self.one_and_next
        result, ahead.held = run(ahead.queue, held, vote)
        return result

    def _build_by(self, function: Any, *inputs: Any) -> None:
        """Builds the layers that a step calls, and restores their states from the checkpoint."""
        if function.experimental_get_tracing_count() == 0:
            # This traces the function and runs nothing.
            function.get_concrete_function(*inputs)
            run_state.restore_late(self._model)


def report_trace() -> None:
    """Tells the launcher that an execution is being traced.

    Python code of a compiled function runs only when TensorFlow traces it.
    """
    if not tf.executing_eagerly():
        heartbeat().tracing()

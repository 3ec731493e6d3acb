"""Compiles what `fit` and `evaluate` call for each execution.

An execution takes one or several steps from an iterator and returns what all replicas
found, with one collective for all metrics together. The iterator yields global batches, of
which a step keeps its `WorkerBatch`: this worker's part, one share a local replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfmulti.distribution import connections
from tfmulti.distribution.strategies import Placement
from tfmulti.keras_patches import installation
from tfmulti.keras_patches.random_numbers import step_generator
from tfmulti.launch.heartbeat import heartbeat
from tfmulti.training.input.worker_batch import (
    Ahead,
    Replay,
    WorkerBatch,
    on_devices,
    with_any_rows,
)
from tfmulti.training.state import run_state
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step import local_steps
from tfmulti.training.step.step import agreed, make_step, taken, warn_of_unknown, without_autograph
from tfmulti.training.step.step_logs import StepLogs
from tfmulti.training.step.step_result import StepResult, Summary, Taken, time_of


class Execution:
    """`execution(source, steps, votes)`, for training or for evaluation.

    It runs `steps` steps from a queue or an iterator of global batches, or one step on a
    `WorkerBatch` or an Optional of a batch, and returns their `StepResult`. `votes` are this
    worker's. An iterator must have that many batches: a step without a batch would still do what
    needs no data, draw seeds and count itself.

    Attributes:
        one: takes a source and votes, and runs a step.
        several: takes an iterator, the number of steps, and votes.
        one_and_next: takes an outlet, `WorkerBatch` and votes: see `Ahead`.
        is_verified: whether its first steps were compared with one device's (`verification`).
    """

    def __init__(self, model: keras.Model, placement: Placement, *, training: bool) -> None:
        self.is_verified = False
        self._traced: tuple[Any, Any] | None = None  # a source, and the execution that takes it
        self._training = training
        installation.install()
        seeds = step_generator(model)
        self._model, self._placement, self._state = model, placement, state_of(model)
        logs = StepLogs(model)
        self._step = make_step(model, placement, seeds, logs, training=training)
        self._summary = Summary(model, placement, logs, training=training)
        alone = agreed(model, placement)
        self._agreed = alone or self._taken
        # A collective before the step (`agreed`) may not run beside those of another one.
        compiles = not model.run_eagerly
        self._goes_ahead = compiles and alone is None and local_steps.steps_at_once(model) == 1
        apart = training and self._state.outer is not None
        self._may_gather = compiles and placement.replicas > 1 and not apart
        self.one: Any = self._one
        self.several: Any = self._several
        if compiles:
            self.one = without_autograph(self._one)
            self.several = without_autograph(self._several)
        self.one_and_next = without_autograph(self._one_and_next)
        self._first = without_autograph(
            lambda outlet: on_devices(self._taken(outlet), placement.gpus)
        )

    def __call__(self, source: Any, steps: int, votes: Sequence[float]) -> StepResult:
        with connections.own_errors(self._placement):
            found = self._call(source, steps, votes)
        name = "train_step" if self._training else "test_step"
        warn_of_unknown(self._model, self._placement, name)
        return found

    def _call(self, source: Any, steps: int, votes: Sequence[float]) -> StepResult:
        vote = tf.constant(votes, tf.float32)
        if isinstance(source, Replay):
            source = source.source(steps)
        if isinstance(source, Ahead):
            if self._goes_ahead:
                return self._ahead(source, vote)
            source = source.outlet
        found: StepResult
        traced = self._traced_for(source)
        if traced is not None:
            found = traced(source, vote) if steps == 1 else traced(source, tf.constant(steps), vote)
            return found
        if self._state.saved_variables and not self._model.run_eagerly:
            if steps == 1:
                self._build_by(self.one, source, vote)
            else:
                self._build_by(self.several, source, tf.constant(steps), vote)
        if steps == 1:
            found = self.one(source, vote)
            return found
        count = tf.constant(steps)
        if self._may_gather and self.several.experimental_get_tracing_count() == 0:
            # Tells whether steps gather rows: a collective of one function takes one shape a
            # call, so batches of several sizes need calls of their own.
            self.several.get_concrete_function(source, count, vote)
        if self._may_gather and self._state.gathers:
            return self._one_by_one(source, steps, vote)
        found = self.several(source, count, vote)
        return found

    def trace(self, source: Any, steps: int, votes: Sequence[float]) -> None:
        """Traces an execution, which builds what its steps call first. It runs no step.

        The next execution from that source is the one that was traced, on whatever thread and in
        whatever scope: it is not traced again there.
        """
        if self._model.run_eagerly:
            return
        vote = tf.constant(votes, tf.float32)
        if isinstance(source, Ahead) and self._goes_ahead:
            source.held = self._first(source.outlet) if source.held is None else source.held
            held = with_any_rows(source.held)
            concrete = self.one_and_next.get_concrete_function(source.outlet, held, vote)
            self._traced = source.outlet, concrete
            return
        source = source.outlet if isinstance(source, Ahead) else source
        if steps == 1:
            self._traced = source, self.one.get_concrete_function(source, vote)
        else:
            count = tf.constant(steps)
            self._traced = source, self.several.get_concrete_function(source, count, vote)

    def _traced_for(self, source: Any) -> Any:
        traced, self._traced = self._traced, None
        return traced[1] if traced is not None and traced[0] is source else None

    def _taken(self, source: Any) -> WorkerBatch:
        return taken(source, self._placement)

    def _one(self, source: Any, votes: tf.Tensor) -> StepResult:
        _tell_of_trace()
        before = self._summary.before()
        taken = Taken.nothing(self._placement)  # it waits from here on
        shards = self._agreed(source)
        taken = taken.counted(shards).waited_for(time_of(shards))
        return self._summary.after(shards, self._step(shards), votes, before, taken)

    def _one_and_next(
        self, source: Any, shards: WorkerBatch, votes: tf.Tensor
    ) -> tuple[StepResult, WorkerBatch]:
        """Runs a step on a batch that is on the GPUs, and brings the next one there meanwhile."""
        _tell_of_trace()
        before = self._summary.before()
        taken = Taken.nothing(self._placement).counted(shards)
        following = on_devices(self._taken(source), self._placement.gpus)
        found = self._step(shards)
        taken = taken.after(found).waited_for(time_of(following))
        return self._summary.after(shards, found, votes, before, taken), following

    def _several(self, iterator: Any, steps: tf.Tensor, votes: tf.Tensor) -> StepResult:
        _tell_of_trace()
        before = self._summary.before()
        taken = Taken.nothing(self._placement)

        def step(number: tf.Tensor, taken: Taken) -> tuple[tf.Tensor, Taken]:
            shards = self._agreed(iterator)
            taken = taken.counted(shards).waited_for(time_of(shards))
            return number + 1, taken.after(self._step(shards))

        before_last = steps - 1
        _, taken = tf.while_loop(
            lambda number, _: number < before_last, step, (0, taken), parallel_iterations=1
        )
        shards = self._agreed(iterator)
        taken = taken.counted(shards).waited_for(time_of(shards))
        return self._summary.after(shards, self._step(shards), votes, before, taken)

    def _one_by_one(self, source: Any, steps: int, vote: tf.Tensor) -> StepResult:
        found = [self.one(source, vote) for _ in range(steps)]
        summed = ("rows", "lost", "waited_s")
        sums = {name: tf.add_n([getattr(each, name) for each in found]) for name in summed}
        last: StepResult = found[-1]
        return last._replace(**sums)

    def _ahead(self, ahead: Ahead, vote: tf.Tensor) -> StepResult:
        held = self._first(ahead.outlet) if ahead.held is None else ahead.held
        if self.one_and_next.experimental_get_tracing_count() == 0:
            # Once for any number of rows, and not again for the last batch.
            self.one_and_next.get_concrete_function(ahead.outlet, with_any_rows(held), vote)
            run_state.restore_late(self._model)
        found: StepResult
        run = self._traced_for(ahead.outlet) or self.one_and_next
        found, ahead.held = run(ahead.outlet, held, vote)
        return found

    def _build_by(self, function: Any, *inputs: Any) -> None:
        """Builds the layers that a step calls first, and gives them what was saved of them."""
        if function.experimental_get_tracing_count() == 0:
            function.get_concrete_function(*inputs)  # traces, and runs nothing
            run_state.restore_late(self._model)


def _tell_of_trace() -> None:
    """Tells the launcher that an execution is traced: the code of a function runs only then."""
    if not tf.executing_eagerly():
        heartbeat().tracing()

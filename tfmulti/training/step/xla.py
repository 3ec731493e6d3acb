"""Compiles a step's forward and backward pass by XLA, on each replica by itself.

Replicas cannot reduce inside a compiled function. So the function returns the gradients, which are
summed and applied after it. This is right for Keras' own `train_step`, because nothing in it after
the update depends on the update.

A pass that needs the other replicas, for batch statistics or a loss of all rows, is not compiled.
A pass that draws random numbers is not compiled either, because XLA draws other numbers than
several replicas do. Such a step is traced again without XLA. https://www.tensorflow.org/xla
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfmulti.config.troubleshooting import documented
from tfmulti.distribution.replica_slice import compiling
from tfmulti.distribution.strategies import placement_of
from tfmulti.keras_patches.model_structure import has_own_step, layers_of
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step.microbatches import giving_gradients_to

Step = Callable[[Any], Any]


def xla_compiled(model: keras.Model, step: Step) -> Step:
    """Returns a step whose passes XLA compiles, or the same step if XLA is not used.

    The user asks for XLA by `prepare(jit_compile=True)` or by `compile`. On GPUs XLA is the
    default. A warning tells why XLA cannot compile a step for which the user asked.
    """
    chosen = state_of(model).options.jit_compile
    is_requested = bool(model.jit_compile) if chosen is None else chosen
    by_default = chosen is None and bool(placement_of(model.distribute_strategy).gpus)
    if model.run_eagerly or not (is_requested or by_default):
        return step
    obstacle = _obstacle(model)
    if obstacle is None:
        return _by_xla(step, is_requested)
    if is_requested:
        _warn(obstacle)
    return step


def _obstacle(model: keras.Model) -> str | None:
    """Returns why XLA cannot compile a model's step, or None if only tracing can show it."""
    if has_own_step(model, "train_step"):
        return "a train_step of your own may read variables after their update"
    if state_of(model).options.microbatches > 1:
        return "--microbatches takes several passes"
    if any(not layer.supports_jit for layer in layers_of(model)):
        return "a layer does not support it"
    return None


def _by_xla(step: Step, is_requested: bool) -> Step:
    """Returns a step that XLA compiles. If tracing shows an obstacle, it runs without XLA."""

    def run(data: Any) -> Any:
        obstacles: list[str] = []
        taker = _GradientTaker()

        @tf.function(jit_compile=True, autograph=False)  # type: ignore[untyped-decorator]
        def passes(data: Any) -> Any:
            with compiling(obstacles), giving_gradients_to(taker):
                logs = step(data)
            return logs, taker.gradients

        try:
            logs, gradients = passes(data)
        except Exception:
            # Keras may replace CannotCompileError by another exception. So the list of obstacles
            # shows whether it was the cause.
            if not obstacles:
                raise
            if is_requested:
                _warn(f"it {obstacles[0]}")
            return step(data)
        if taker.optimizer is not None:
            taker.optimizer.apply(gradients, taker.variables)
        return logs

    return run


class _GradientTaker:
    """Holds the gradients of a step, with the optimizer and the variables that they are for."""

    def __init__(self) -> None:
        self.optimizer: Any = None
        self.gradients: Sequence[Any] = ()
        self.variables: Any = None

    def take(self, optimizer: Any, gradients: Sequence[Any], variables: Any) -> None:
        """Stores the gradients, as a `microbatches.Taker`."""
        self.optimizer, self.gradients, self.variables = optimizer, list(gradients), variables


def _warn(reason: str) -> None:
    """Warns the user who has requested XLA that XLA does not compile the step."""
    words = f"XLA does not compile this step (jit_compile): {reason}."
    warnings.warn(documented(words), stacklevel=2)

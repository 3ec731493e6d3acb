"""A step's forward and backward pass compiled by XLA, on each replica by itself.

Replicas cannot meet inside a compiled function. So the gradients are taken out of it, and summed
and applied after it; of Keras' own `train_step` nothing else comes after them that depends on them.
A pass that needs the other replicas (batch statistics or a loss of all rows) is not compiled, nor
one that draws random numbers: XLA's are others than those of several replicas.
https://www.tensorflow.org/xla
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfmulti.distribution.replica_slice import compiling
from tfmulti.distribution.strategies import Placement
from tfmulti.keras_patches.model_structure import layers_of
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step.microbatches import giving_gradients_to

Step = Callable[[Any], Any]


def xla_compiled(model: keras.Model, step: Step, placement: Placement) -> Step:
    """Returns a step whose passes XLA compiles, or the same where it shall or can not.

    Where it was asked for and cannot be done, a warning says why.
    """
    chosen = state_of(model).jit_compile
    asked = bool(model.jit_compile) if chosen is None else chosen
    by_default = chosen is None and bool(placement.gpus)
    if model.run_eagerly or not (asked or by_default):
        return step
    hindrance = _hindrance(model)
    if hindrance is None:
        return _by_xla(step, asked)
    if asked:
        _warn(hindrance)
    return step


def _hindrance(model: keras.Model) -> str | None:
    """Returns why a model's step cannot be compiled, if that is known before it is traced."""
    if type(model).train_step is not keras.Model.train_step:
        return "a train_step of your own may use what its updates leave"
    if state_of(model).microbatches > 1:
        return "--microbatches takes several passes"
    if any(not layer.supports_jit for layer in layers_of(model)):
        return "a layer does not support it"
    return None


def _by_xla(step: Step, asked: bool) -> Step:
    def run(data: Any) -> Any:
        hindrances: list[str] = []
        kept = _Kept()

        @tf.function(jit_compile=True, autograph=False)  # type: ignore[untyped-decorator]
        def passes(data: Any) -> Any:
            with compiling(hindrances), giving_gradients_to(kept):
                logs = step(data)
            return logs, kept.gradients

        try:
            logs, gradients = passes(data)
        except Exception:
            if not hindrances:
                raise
            if asked:
                _warn(f"it {hindrances[0]}")
            return step(data)
        if kept.optimizer is not None:
            kept.optimizer.apply(gradients, kept.variables)
        return logs

    return run


class _Kept:
    """The gradients of a step, and whose they are."""

    def __init__(self) -> None:
        self.optimizer: Any = None
        self.gradients: Sequence[Any] = ()
        self.variables: Any = None

    def take(self, optimizer: Any, gradients: Sequence[Any], variables: Any) -> None:
        self.optimizer, self.gradients, self.variables = optimizer, list(gradients), variables


def _warn(reason: str) -> None:
    warnings.warn(f"XLA does not compile this step (jit_compile): {reason}.", stacklevel=2)

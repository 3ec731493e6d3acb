"""Compiles a step by XLA, on each replica by itself (https://www.tensorflow.org/xla).

A single replica's step is compiled as a whole, as Keras compiles it, with the update of the
weights.

Several replicas cannot reduce inside a compiled function. So there only the forward and backward
pass of a training step is compiled. The function returns the gradients, which are summed and
applied after it. This is right for Keras' own `train_step`, because nothing in it after the update
depends on the update.

A pass that needs the other replicas, for batch statistics or a loss of all rows, is not compiled.
Nor is one with random numbers that XLA would draw otherwise (`distribution.randomness`). Such a
step is traced again without XLA. Where XLA is only the default, a step of sparse, ragged or text
data is not compiled either.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfmulti.config.troubleshooting import documented
from tfmulti.distribution.lookup_gradients import Lookup, joined_lookups, lookups_in
from tfmulti.distribution.replica_slice import compiling, refuse_to_compile
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import ModelError
from tfmulti.keras_patches.model_structure import has_own_step, is_for_xla, layers_of
from tfmulti.keras_patches.random_numbers import generators_restored_on_error
from tfmulti.keras_patches.tracing import nodes_of
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step.microbatches import giving_gradients_to

Step = Callable[[Any], Any]


def xla_compiled(model: keras.Model, step: Step, name: str) -> Step:
    """Returns a step that XLA compiles, or the same step if XLA is not used.

    The user asks for XLA by `prepare(jit_compile=True)` or by `compile`. On GPUs XLA is the
    default. A warning tells why XLA cannot compile a step for which the user asked.

    Args:
        model: the prepared model.
        step: the model's step.
        name: `train_step`, `test_step` or `predict_step`. Of several replicas, only the training
            step is compiled.
    """
    chosen = state_of(model).options.jit_compile
    is_chosen = bool(model.jit_compile) if chosen is None else chosen
    placement = placement_of(model.distribute_strategy)
    is_alone = placement.replicas == 1
    by_default = chosen is None and bool(placement.gpus)
    if model.run_eagerly or not (is_chosen or by_default):
        return step
    if name != "train_step" and not is_alone:
        return step
    # Where Keras sees a GPU, it may have chosen True itself.
    sees_gpu = bool(tf.config.list_physical_devices("GPU"))
    is_requested = is_chosen and (chosen is not None or not sees_gpu)
    obstacle = _obstacle(model, name, is_alone)
    if obstacle is None:
        return _by_xla(model, step, name, is_requested, is_alone)
    if is_requested:
        _warn(obstacle)
    return step


def _obstacle(model: keras.Model, name: str, is_alone: bool) -> str | None:
    """Returns why XLA cannot compile a model's step, or None if only tracing can show it."""
    if not is_alone and has_own_step(model, name):
        return "a train_step of your own may read variables after their update"
    if name == "train_step" and state_of(model).options.microbatches > 1:
        return "--microbatches takes several passes"
    if is_for_xla(model):
        return None
    if all(layer.supports_jit for layer in layers_of(model)):
        return "TensorFlow's operations are deterministic, and XLA lacks some of these"
    return "a layer does not support it"


def _by_xla(model: keras.Model, step: Step, name: str, is_requested: bool, is_alone: bool) -> Step:
    """Returns a step that XLA compiles. If tracing shows an obstacle, it runs without XLA."""

    def run(data: Any) -> Any:
        # `predict` may build layers, which draw their first weights while the step is traced.
        is_built = name != "predict_step" or all(layer.built for layer in layers_of(model))
        if not is_built or not (is_requested or is_dense(data)):
            return step(data)
        obstacles: list[str] = []
        taker = _GradientTaker()

        @tf.function(jit_compile=True, autograph=False)  # type: ignore[untyped-decorator]
        def passes(data: Any) -> Any:
            updates_inside = contextlib.nullcontext() if is_alone else giving_gradients_to(taker)
            with compiling(obstacles), updates_inside:
                logs = step(data)
            return logs, taker.tensors()

        try:
            with generators_restored_on_error():
                _refuse_draws(passes.get_concrete_function(data).graph, obstacles)
                logs, tensors = passes(data)
        except Exception:
            # Keras may replace CannotCompileError by another exception. So the list of obstacles
            # shows whether it was the cause.
            if not obstacles:
                raise
            if is_requested:
                _warn(f"it {obstacles[0]}")
            return step(data)
        if taker.optimizer is not None:
            taker.optimizer.apply(taker.gradients_of(tensors), taker.variables)
        return logs

    return run


# The operations of `distribution.randomness`, whose bits XLA draws as the kernels do.
_EXACT_DRAWS = (
    "StatelessRandomGetAlg",
    "StatelessRandomGetKeyCounter",
    "StatelessRandomUniformFullIntV2",
    "StatelessRandomUniformIntV2",
)
_DRAW = re.compile("Random|Rng|StandardNormal|TruncatedNormal|StatefulUniform|Multinomial")


def _refuse_draws(graph: Any, obstacles: list[str]) -> None:
    """Raises an error if a graph draws numbers that XLA would draw otherwise, as by `tf.random`.

    XLA also ignores the seeds of operations that keep a state
    (https://www.tensorflow.org/xla/known_issues).
    """
    for node in nodes_of(graph):
        if _DRAW.search(node.op) and node.op not in _EXACT_DRAWS:
            with compiling(obstacles):
                refuse_to_compile(f"draws by {node.op}, and XLA would draw other numbers")


def is_dense(data: Any) -> bool:
    """Returns whether no leaf is sparse, ragged or text, for which XLA lacks many operations."""
    kinds = (tf.SparseTensor, tf.RaggedTensor)
    return not any(
        isinstance(leaf, kinds) or getattr(leaf, "dtype", None) == tf.string
        for leaf in tf.nest.flatten(data)
    )


# What TensorFlow's errors say if XLA cannot compile a function, or not for this GPU.
_OF_XLA = (
    "tf2xla conversion failed",
    "trying to compile graph",
    "cannot be run on XLA",
    "Autotuner could not find",
)
_UNKNOWN_OPERATION = re.compile(r"trying to compile graph .* on XLA_\w+: (\w+)")
_REASON = re.compile(r"^.*(?:Autotuner|XLA implementation|compile-time constant).*$", re.MULTILINE)
_OPERATION = re.compile(r"\{\{node (?!StatefulPartitionedCall)([^}]+)\}\}|op_name=\"([^\"]+)\"")


@contextlib.contextmanager
def compile_errors_explained() -> Iterator[None]:
    """Raises a ModelError with advice in place of TensorFlow's error that XLA cannot compile."""
    try:
        yield
    except tf.errors.OpError as error:
        message = error.message
        is_of_memory = isinstance(error, tf.errors.ResourceExhaustedError)
        if is_of_memory or not any(words in message for words in _OF_XLA):
            raise
        unknown, reason = _UNKNOWN_OPERATION.search(message), _REASON.search(message)
        operation = _OPERATION.search(message)
        place = f" at {(operation[1] or operation[2])!r}" if operation else ""
        cause = ""
        if unknown:
            cause = f": it does not know the operation {unknown[1]}"
        elif reason:
            cause = f": {reason[0].strip()[:120]}"
        raise ModelError(
            f"XLA cannot compile this step{place}{cause}. XLA is the default on GPUs. Train "
            "without it: --nojit_compile, or prepare(jit_compile=False)."
        ) from error


class _GradientTaker:
    """Holds the gradients of a step, with the optimizer and the variables that they are for."""

    def __init__(self) -> None:
        self.optimizer: Any = None
        self.variables: Any = None
        self._gradients: list[Any] = []
        # For each gradient its lookups, of which a dense gradient has none.
        self._lookups: list[list[Lookup]] = []

    def take(self, optimizer: Any, gradients: Sequence[Any], variables: Any) -> None:
        """Stores the gradients, as a `microbatches.Taker`."""
        self.optimizer, self.variables = optimizer, variables
        self._gradients = list(gradients)
        self._lookups = [
            lookups_in(g) if isinstance(g, tf.IndexedSlices) else [] for g in gradients
        ]

    def tensors(self) -> list[Any]:
        """Returns the gradients as the compiled function returns them: each lookup by itself.

        Outside of the function it is no longer known which lookups a gradient has.
        """
        return [
            [tf.IndexedSlices(lookup.values, lookup.indices, g.dense_shape) for lookup in lookups]
            or g
            for g, lookups in zip(self._gradients, self._lookups, strict=True)
        ]

    def gradients_of(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns the gradients from what the compiled function has returned for `tensors`."""
        gradients = []
        for found, lookups in zip(tensors, self._lookups, strict=True):
            if not lookups:
                gradients.append(found)
                continue
            pairs = zip(found, lookups, strict=True)
            outside = [old._replace(values=p.values, indices=p.indices) for p, old in pairs]
            gradients.append(joined_lookups(outside, found[0]))
        return gradients


def _warn(reason: str) -> None:
    """Warns the user who has requested XLA that XLA does not compile the step."""
    words = f"XLA does not compile this step (jit_compile): {reason}."
    warnings.warn(documented(words), stacklevel=2)

"""Runs a few steps of a model on one device, as plain Keras takes them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti.distribution import python_attributes
from tfmulti.distribution.python_attributes import Attributes
from tfmulti.keras_patches.random_numbers import made_global_generator
from tfmulti.keras_patches.tracing import nodes_of, optimized_once, traces_of
from tfmulti.keras_patches.variables import array_of, tf_variable_of
from tfmulti.training.input.worker_batch import of_any_rows, specs_of_any_rows
from tfmulti.training.state import relocation
from tfmulti.training.verification import comparison, recording
from tfmulti.training.verification.compared import names

Values = dict[str, list[np.ndarray]]

# These operations draw from TensorFlow's own generators.
_DRAWS = names(
    "RandomUniform RandomUniformInt RandomStandardNormal TruncatedNormal "
    "ParameterizedTruncatedNormal RandomShuffle RandomGammaRandomGrad RandomGamma "
    "RandomPoissonV2 Multinomial RngReadAndSkip RngSkip StatefulStandardNormalV2 "
    "StatefulUniform StatefulUniformInt StatefulTruncatedNormal"
)

# These operations call Python, print, write to files, tables or queues, or loop, maybe without end
# for another input.
_NOT_FOR_ONE_ROW = re.compile("PyFunc|Print|Summary|Write|Save|While|Enqueue|Table(Insert|Remove)")


@dataclass
class PlainResult:
    """The numbers of one device after the steps.

    Attributes:
        values: the value of each variable, by name.
        logs: the logs of the last step, by name.
    """

    values: dict[str, np.ndarray]
    logs: dict[str, np.ndarray]


class PlainRun:
    """Takes steps of a model on one device, with plain variables and the model's own class.

    Args:
        model: the model, inside `relocation.on_one_device`.
        variables: the plain variables, by name.
        begin: the values of the variables at the beginning, by name.
        attributes: the numbers and texts that objects of the model held at the beginning.
        drawn_by: the state from which draws without a seed begin, or None.
        unit: the last digit with which the model computes (`comparison.compare`).
    """

    def __init__(
        self,
        model: keras.Model,
        variables: Mapping[str, tf.Variable],
        begin: Values,
        attributes: Attributes,
        drawn_by: np.ndarray | None,
        unit: float,
    ) -> None:
        self._model, self._variables, self._begin = model, variables, begin
        self._attributes, self._drawn_by, self._unit = attributes, drawn_by, unit
        # The ids of the plain variables that are trained. Keras' variables hold these inside
        # `on_one_device`. The second run perturbs them.
        self._trained = {id(tf_variable_of(v)) for v in model.trainable_variables}
        self._perturbs = tf.Variable(False, trainable=False)

    def compiled(self, step: Any) -> Any:
        """Returns a step as Keras alone compiles it, for any number of rows."""
        step = self._perturbing_gradients(step)
        if self._model.run_eagerly:
            return step
        return tf.function(recording.with_line_marker(lambda batch: step(of_any_rows(batch))))

    def trace(self, step: Any, batch: Any, *, may_run: bool) -> None:
        """Traces a step, so that `run` only has to run it.

        Args:
            step: a step that `compiled` returned.
            batch: the global batch.
            may_run: whether the step may be run for the first row. TensorFlow optimizes a graph
                when it is first run, which takes longer than the run itself. One row needs so
                little memory that the replicas may compute at the same time.
        """
        python_attributes.restore(self._attributes)
        leaves = tf.nest.flatten(batch)
        if not (
            may_run and all(isinstance(leaf, tf.Tensor) and leaf.shape.rank for leaf in leaves)
        ):
            step.get_concrete_function(batch)
            return
        graph = step.get_concrete_function(specs_of_any_rows(batch)).graph
        if not any(_NOT_FOR_ONE_ROW.search(node.op) for node in nodes_of(graph)):
            # A step that cannot take one row is optimized when it first takes all of them.
            with contextlib.suppress(Exception):
                self.run(step, [tf.nest.map_structure(lambda leaf: leaf[:1], batch)])

    def _perturbing_gradients(self, step: Any) -> Any:
        """Returns a step whose optimizers get perturbed gradients if `run` asks for that.

        The perturbation is relative to the largest gradient. A gradient that is smaller than the
        perturbation is rounding only, such as that of a bias before a normalization. Adam turns it
        into a large step.
        """
        original = keras.optimizers.Optimizer.apply

        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            return original(optimizer, self._perturbed_gradients(list(grads)), trainable_variables)

        def perturbing(batch: Any) -> Any:
            keras.optimizers.Optimizer.apply = apply
            try:
                return step(batch)
            finally:
                keras.optimizers.Optimizer.apply = original

        return perturbing

    def _perturbed_gradients(self, gradients: list[Any]) -> list[Any]:
        """Returns the gradients, each number moved towards 0 or beyond it if `_perturbs` is True.

        A number that is rounding only changes its sign.
        """
        values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        values = [None if v is None else tf.convert_to_tensor(v) for v in values]
        sizes = [tf.cast(tf.reduce_max(tf.abs(v)), tf.float64) for v in values if v is not None]
        largest = tf.reduce_max(tf.stack([*sizes, tf.constant(0.0, tf.float64)]))
        changes: dict[tf.DType, tf.Tensor] = {}
        for dtype in {value.dtype for value in values if value is not None}:
            number = comparison.relative_perturbation(np.dtype(dtype.as_numpy_dtype), self._unit)
            change = tf.cast(comparison.GRADIENTS_PERTURBED_BY * number * largest, dtype)
            changes[dtype] = tf.where(self._perturbs, change, tf.zeros_like(change))
        perturbed: list[Any] = []
        for gradient, value in zip(gradients, values, strict=True):
            if value is None:
                perturbed.append(None)
                continue
            change = changes[value.dtype]
            # Few operations, because a model may have hundreds of gradients.
            value += tf.where(value > 0, -change, change)
            recording.set_source(value, gradient)
            if isinstance(gradient, tf.IndexedSlices):
                value = tf.IndexedSlices(value, gradient.indices, gradient.dense_shape)
            perturbed.append(value)
        return perturbed

    def run(self, step: Any, batches: Sequence[Any], *, is_perturbed: bool = False) -> PlainResult:
        """Takes steps from the state at the beginning, and returns the numbers after them."""
        self._reset(is_perturbed)
        with optimized_once():
            for batch in batches:
                logs = step(batch)
        values = {name: relocation.value_of(v) for name, v in self._variables.items()}
        return PlainResult(values, {name: array_of(value) for name, value in flat(logs)})

    def call(self, step: Any, batch: Any, *, is_perturbed: bool = False) -> Any:
        """Runs one step from the state at the beginning, and returns what it returns."""
        self._reset(is_perturbed)
        return step(batch)

    def _reset(self, is_perturbed: bool) -> None:
        """Gives variables and attributes their values at the beginning, or perturbs the weights."""
        python_attributes.restore(self._attributes)
        self._perturbs.assign(is_perturbed)
        rng = np.random.default_rng(19)
        for name, variable in self._variables.items():
            value = self._begin[name][0]
            if is_perturbed and id(variable) in self._trained:
                value = comparison.perturbed(value, rng, self._unit)
            variable.assign(value)
        # Draws without a seed come from a generator of tfmulti's on replicas, and from Keras' own
        # on one device. Both begin with the same state.
        if self._drawn_by is not None:
            made_global_generator().state.assign(self._drawn_by)


def flat(logs: Any) -> list[tuple[str, Any]]:
    """Returns the innermost names and numbers of a step's logs, in Keras' order of the names.

    Of two values with one name the last one is the log. Texts are left out.
    """
    if isinstance(logs, Mapping):
        return [
            (inner or str(name), value)
            for name, entry in sorted(logs.items())
            for inner, value in flat(entry)
        ]
    is_number = isinstance(logs, (tf.Tensor, np.generic, float, int))
    return [("", logs)] if is_number and getattr(logs, "dtype", None) != tf.string else []


def random_operations(step: Any) -> tuple[tuple[str, ...], str | None]:
    """Returns the operations of a traced step that draw from TensorFlow's own generators.

    Returns:
        The names of the operations, and the line of the user's step that draws first, or None.
    """
    if not hasattr(step, "get_concrete_function"):
        return (), None
    operations: set[str] = set()
    line = None
    for concrete in traces_of(step):
        operations |= {node.op for node in nodes_of(concrete.graph) if node.op in _DRAWS}
        drawing = [op for op in concrete.graph.get_operations() if op.type in _DRAWS]
        lines = (recording.line_of(op.outputs[0]) for op in drawing if op.outputs)
        line = line or next(filter(None, lines), None)
    return tuple(sorted(operations)), line

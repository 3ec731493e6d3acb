"""A few steps of a model on one device, as plain Keras takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti.keras_patches.random_numbers import made_global_generator
from tfmulti.keras_patches.tracing import traces_of
from tfmulti.keras_patches.variables import tf_variable_of
from tfmulti.training.input.worker_batch import of_any_rows
from tfmulti.training.state import relocation
from tfmulti.training.verification import comparison, recording

Values = dict[str, list[np.ndarray]]

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


@dataclass
class After:
    """What one device has after the steps."""

    values: dict[str, np.ndarray]
    logs: dict[str, np.ndarray]


class PlainRun:
    """The model on one device, with plain variables and its own class."""

    def __init__(
        self,
        model: keras.Model,
        variables: Mapping[str, tf.Variable],
        begin: Values,
        drawn_by: np.ndarray | None,
        unit: float,
    ) -> None:
        self._model, self._variables, self._begin = model, variables, begin
        self._drawn_by, self._unit = drawn_by, unit
        # Keras' weights keep the objects: those that are trained are moved by some digits.
        of = tf_variable_of
        self._trained = {id(of(v)) for v in model.trainable_variables}
        self._moves = tf.Variable(False, trainable=False)

    def compiled(self, step: Any) -> Any:
        """Returns a step as Keras alone compiles it, for any number of rows."""
        step = self._moving_gradients(step)
        if self._model.run_eagerly:
            return step
        return tf.function(recording.marked(lambda batch: step(of_any_rows(batch))))

    def _moving_gradients(self, step: Any) -> Any:
        """Returns a step whose optimizers get gradients that move where `run` asks for it.

        They move by some digits of the largest of them. What is so much smaller is rounding: the
        gradient of a bias before a normalization is nothing else, and Adam makes much of it.
        """
        original = keras.optimizers.Optimizer.apply

        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            return original(optimizer, self._moved(list(grads)), trainable_variables)

        def moving(batch: Any) -> Any:
            keras.optimizers.Optimizer.apply = apply
            try:
                return step(batch)
            finally:
                keras.optimizers.Optimizer.apply = original

        return moving

    def _moved(self, gradients: list[Any]) -> list[Any]:
        """Returns gradients, each number of them moved up or down where that is asked for."""
        values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        values = [None if v is None else tf.convert_to_tensor(v) for v in values]
        sizes = [tf.reduce_max(tf.abs(tf.cast(v, tf.float64))) for v in values if v is not None]
        largest = tf.reduce_max(tf.stack([*sizes, tf.constant(0.0, tf.float64)]))
        found: list[Any] = []
        for number, (gradient, value) in enumerate(zip(gradients, values, strict=True)):
            if value is None:
                found.append(None)
                continue
            part = comparison.moved_part(np.dtype(value.dtype.as_numpy_dtype), self._unit)
            sides = tf.sign(tf.random.stateless_uniform(tf.shape(value), [19, number], -1.0, 1.0))
            size = comparison.GRADIENTS_MOVED_BY * part * largest
            moved = value + tf.cast(sides, value.dtype) * tf.cast(size, value.dtype)
            value = tf.where(self._moves, moved, value)
            recording.stand_for(value, gradient)
            if isinstance(gradient, tf.IndexedSlices):
                value = tf.IndexedSlices(value, gradient.indices, gradient.dense_shape)
            found.append(value)
        return found

    def run(self, step: Any, batches: Sequence[Any], *, by_digits: bool = False) -> After:
        """Takes the steps from the state at the beginning."""
        self._reset(by_digits)
        for batch in batches:
            logs = step(batch)
        values = {name: np.asarray(variable) for name, variable in self._variables.items()}
        return After(values, {name: np.asarray(value) for name, value in flat(logs)})

    def call(self, step: Any, batch: Any, *, by_digits: bool = False) -> Any:
        """Returns what one step returns, from the state at the beginning."""
        self._reset(by_digits)
        return step(batch)

    def _reset(self, by_digits: bool) -> None:
        self._moves.assign(by_digits)
        rng = np.random.default_rng(19)
        for name, variable in self._variables.items():
            value = self._begin[name][0]
            if by_digits and id(variable) in self._trained:
                value = comparison.moved_by_digits(value, rng, self._unit)
            variable.assign(value)
        # The replicas draw by it what one device draws by Keras' own.
        if self._drawn_by is not None:
            made_global_generator().state.assign(self._drawn_by)


def flat(logs: Any) -> list[tuple[str, Any]]:
    """Returns a step's logs, which may be nested, by name."""
    if isinstance(logs, Mapping):
        return [
            (f"{name}/{inner}" if inner else str(name), value)
            for name, each in logs.items()
            for inner, value in flat(each)
        ]
    return [("", logs)] if isinstance(logs, (tf.Tensor, np.generic, float, int)) else []


Attributes = list[tuple[Any, dict[str, Any]]]


def attributes_of(state: relocation.State) -> Attributes:
    """Returns the numbers and texts that objects hold as attributes of Python's."""
    kinds = (int, float, str)
    return [
        (thing, {name: v for name, v in vars(thing).items() if isinstance(v, kinds)})
        for thing in state.objects
    ]


def set_attributes(attributes: Attributes) -> None:
    """Gives objects back numbers and texts that a step has changed.

    What is True or False stays: layers are built once.
    """
    for thing, before in attributes:
        for name, value in before.items():
            now = vars(thing).get(name)
            if type(now) is type(value) and now != value and not isinstance(value, bool):
                thing.__dict__[name] = value


def random_operations(step: Any) -> tuple[tuple[str, ...], str | None]:
    """Returns the operations of a traced step that draw by TensorFlow's own generators.

    And the line of the step that the first of them comes from, if that is known.
    """
    if not hasattr(step, "get_concrete_function"):
        return (), None
    found: set[str] = set()
    line = None
    for concrete in traces_of(step):
        definition = concrete.graph.as_graph_def(add_shapes=False)
        nodes = [*definition.node]
        for function in definition.library.function:
            nodes += function.node_def
        found |= {node.op for node in nodes if node.op in _DRAWS}
        drawing = [op for op in concrete.graph.get_operations() if op.type in _DRAWS]
        lines = (recording.line_of(op.outputs[0]) for op in drawing if op.outputs)
        line = line or next((each for each in lines if each), None)
    return tuple(sorted(found)), line

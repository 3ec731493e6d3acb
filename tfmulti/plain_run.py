"""A few steps of a model on one device, as plain Keras takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti import comparison, keras_compat, recording, relocation
from tfmulti.shards import of_any_rows

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
        generator: keras.random.SeedGenerator | None,
        unit: float,
    ) -> None:
        self._model, self._variables, self._begin = model, variables, begin
        self._generator, self._unit = generator, unit
        # Keras' weights keep the objects: those that are trained are moved by a last digit.
        of = keras_compat.tf_variable_of
        self._trained = {id(of(v)) for v in model.trainable_variables}

    def compiled(self, step: Any) -> Any:
        """Returns a step as Keras alone compiles it, for any number of rows."""
        if self._model.run_eagerly:
            return step
        return tf.function(recording.marked(lambda batch: step(of_any_rows(batch))))

    def run(self, step: Any, batches: Sequence[Any], *, by_a_digit: bool = False) -> After:
        """Takes the steps from the state at the beginning."""
        self._reset(by_a_digit)
        for batch in batches:
            logs = step(batch)
        values = {name: np.asarray(variable) for name, variable in self._variables.items()}
        return After(values, {name: np.asarray(value) for name, value in flat(logs)})

    def call(self, step: Any, batch: Any, *, by_a_digit: bool = False) -> Any:
        """Returns what one step returns, from the state at the beginning."""
        self._reset(by_a_digit)
        return step(batch)

    def _reset(self, by_a_digit: bool) -> None:
        rng = np.random.default_rng(19)
        for name, variable in self._variables.items():
            value = self._begin[name][0]
            if by_a_digit and id(variable) in self._trained:
                value = comparison.moved_by_a_digit(value, rng, self._unit)
            variable.assign(value)
        # The replicas draw by it what one device draws by Keras' own.
        own = keras_compat.made_global_generator()
        if self._generator is not None and self._generator is not own:
            own.state.assign(self._generator.state)


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
    for concrete in keras_compat.traces_of(step):
        definition = concrete.graph.as_graph_def(add_shapes=False)
        nodes = [*definition.node]
        for function in definition.library.function:
            nodes += function.node_def
        found |= {node.op for node in nodes if node.op in _DRAWS}
        drawing = [op for op in concrete.graph.get_operations() if op.type in _DRAWS]
        lines = (recording.line_of(op.outputs[0]) for op in drawing if op.outputs)
        line = line or next((each for each in lines if each), None)
    return tuple(sorted(found)), line

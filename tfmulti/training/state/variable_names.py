"""Names of variables that are the same for every model that is built in the same way.

Keras' own names count all layers of a process. So the same model made twice has `dense` and
`dense_2`, and the optimizer's slots are named after these. The names of this module consist of the
position of the layer in the model, the class of the layer, and the name within the layer:

    Sequential/1 Dense/kernel
    optimizer Adam/3 momentum of Sequential/1 Dense/kernel
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfmulti.distribution import replica_context
from tfmulti.keras_patches.model_structure import own_variables, sublayers
from tfmulti.keras_patches.random_numbers import global_generator
from tfmulti.keras_patches.variables import tf_variable_of
from tfmulti.training.state import model_search
from tfmulti.training.state.model_checks import optimizers_of


def named_variables(model: keras.Model) -> dict[str, Any]:
    """Returns all variables except those of metrics by name, layers first, then optimizers."""
    metrics = {id(v) for v in replica_context.metric_variables(model)}
    named: dict[str, Any] = {}
    names: dict[int, str] = {}

    def add(name: str, variable: Any) -> None:
        if id(variable) in metrics or id(variable) in names:
            return
        unique = _unique(name, named)
        named[unique], names[id(variable)] = variable, unique

    for place, layer in places_of(model).items():
        for variable in own_variables(layer):
            add(f"{place}/{variable.name}", variable)
    for variable in model.variables:
        add(f"{type(model).__name__}/{variable.name}", variable)
    for number, optimizer in enumerate(optimizers_of(model)):
        group = f"optimizer {number}" if number else "optimizer"
        slots = _Slots(model, names)
        for index, variable in enumerate(optimizer.variables):
            add(f"{group} {type(optimizer).__name__}/{index} {slots.name(variable)}", variable)
    return named


# The names of variables outside of the model, which a program may make at any time, begin so.
OUTSIDE = "outside of the model: "


def variables_outside(model: keras.Model, known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the other variables that a step may use, by name.

    Such are `tf.Variable`s, and Keras variables of the user's own objects and functions.

    Args:
        model: the model.
        known: the variables of `named_variables`.
    """
    found, generator = model_search.find(model), global_generator()
    inside = [*known.values(), *replica_context.metric_variables(model)]
    inside += [] if generator is None else [generator.state]
    seen = {id(tf_variable_of(v)) for v in inside}
    places = [(name, v, tf_variable_of(v)) for name, v in found.places]
    places += [(holder.name, holder.variable, holder.variable) for holder in found.holders]
    named: dict[str, Any] = {}
    for place, variable, tf_variable in places:
        if tf_variable is None or tf_variable.dtype == tf.string or id(tf_variable) in seen:
            continue
        # The copies of such a variable, as of a metric, are parts of a sum.
        if tf_variable.synchronization is tf.VariableSynchronization.ON_READ:
            continue
        seen.add(id(tf_variable))
        named[_unique(f"{OUTSIDE}{place}", named)] = variable
    return named


def _unique(name: str, named: Mapping[str, Any]) -> str:
    """Returns a name that is not taken: the given one, or the same with a number."""
    unique, count = name, 1
    while unique in named:
        count += 1
        unique = f"{name} {count}"
    return unique


def places_of(model: keras.Model) -> dict[str, Any]:
    """Returns the model and all its layers by their places, such as `Sequential/1 Dense`."""
    return dict(_places(model, type(model).__name__, set()))


def _places(layer: Any, place: str, visited: set[int]) -> Iterator[tuple[str, Any]]:
    visited.add(id(layer))
    yield place, layer
    for number, inner in enumerate(sublayers(layer)):
        if id(inner) not in visited:
            yield from _places(inner, f"{place}/{number} {type(inner).__name__}", visited)


class _Slots:
    """Names the variables of an optimizer. Keras' names for them contain the path of a weight."""

    def __init__(self, model: keras.Model, names: dict[int, str]) -> None:
        paths = {v.path.replace("/", "_"): names[id(v)] for v in model.trainable_variables}
        self._paths = sorted(paths.items(), key=lambda item: -len(item[0]))

    def name(self, variable: Any) -> str:
        """Returns a name such as `momentum of Sequential/1 Dense/kernel`, or Keras' own name."""
        for path, name in self._paths:
            prefix, separator, slot = variable.name.partition(f"{path}_")
            if separator:
                return f"{prefix}{slot} of {name}"
        return str(variable.name)

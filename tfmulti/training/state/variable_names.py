"""Names of variables that are the same for every model that is built in the same way.

Keras' own names count all layers of a process. So the same model made twice has `dense` and
`dense_2`, and the optimizer's slots are named after these. The names of this module consist of the
position of the layer in the model, the class of the layer, and the name within the layer:

    Sequential/1 Dense/kernel
    optimizer Adam/3 momentum of Sequential/1 Dense/kernel
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from tfmulti.distribution import replica_context
from tfmulti.keras_patches.model_structure import own_variables, sublayers
from tfmulti.training.state.model_checks import optimizers_of


def named_variables(model: keras.Model) -> dict[str, Any]:
    """Returns all variables except those of metrics by name, layers first, then optimizers."""
    metrics = {id(v) for v in replica_context.metric_variables(model)}
    named: dict[str, Any] = {}
    names: dict[int, str] = {}

    def add(name: str, variable: Any) -> None:
        if id(variable) in metrics or id(variable) in names:
            return
        unique, count = name, 1
        while unique in named:
            count += 1
            unique = f"{name} {count}"
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

"""Which parts of a model are the user's own, so that nobody can know how they treat rows."""

from __future__ import annotations

from typing import Any

import keras

from tfmulti.keras_patches.model_structure import function_of, layers_of, operations_of
from tfmulti.training.state.model_checks import optimizers_of

_KNOWN = ("keras", "tfmulti")
# Operations of a functional model that compute each element, and so each row, by itself.
_BY_ELEMENT = {
    "Abs",
    "Absolute",
    "Add",
    "Cast",
    "Clip",
    "Cos",
    "Divide",
    "Exp",
    "Log",
    "Log1p",
    "Maximum",
    "Minimum",
    "Multiply",
    "Negative",
    "Power",
    "Relu",
    "Sigmoid",
    "Sin",
    "Sqrt",
    "Square",
    "Subtract",
    "Tanh",
    "TrueDivide",
}


def own_parts(model: keras.Model) -> list[str]:
    """Returns, in words, what of a compiled model is not Keras' own: steps, losses, layers, …."""
    found = []
    for name in ("train_step", "compute_loss", "compute_metrics"):
        if _is_own_method(model, name):
            found.append(name)
    for loss in keras.tree.flatten(getattr(model, "loss", None)):
        if _is_own(loss) or _is_own(getattr(loss, "fn", None)):
            found.append(f"the loss {_name(loss)}")
    for metric in _metrics_of(model):
        if _is_own(metric) or _is_own(function_of(metric)):
            found.append(f"the metric {_name(metric)}")
    for layer in layers_of(model):
        plain = layer is model and not _calls_of_its_own(model)
        if isinstance(layer, keras.layers.Lambda) or (_is_own(layer) and not plain):
            found.append(f"the layer {layer.name}")
    for operation in operations_of(model):
        if type(operation).__name__ not in _BY_ELEMENT:
            found.append(f"the operation {type(operation).__name__}")
    for optimizer in optimizers_of(model):
        if _is_own(optimizer):
            found.append(f"the optimizer {type(optimizer).__name__}")
    return found


def _metrics_of(model: keras.Model) -> list[Any]:
    found: list[Any] = []
    for metric in model.metrics:
        found += getattr(metric, "metrics", None) or [metric]
    return found


def _is_own_method(model: keras.Model, name: str) -> bool:
    function = getattr(type(model), name, None)
    module = getattr(function, "__module__", "keras")
    return str(module).partition(".")[0] not in _KNOWN


def _calls_of_its_own(model: keras.Model) -> bool:
    return _is_own_method(model, "call")


def _is_own(thing: Any) -> bool:
    if thing is None or isinstance(thing, str):
        return False
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return str(module).partition(".")[0] not in _KNOWN


def _name(thing: Any) -> str:
    return str(getattr(thing, "name", None) or getattr(thing, "__name__", type(thing).__name__))

"""Finds the parts of a model that are the user's own code, or parts of Keras that nobody compared.

It is unknown how such code treats the rows of a batch. So a model with such parts is compared with
one device by default.
"""

from __future__ import annotations

from typing import Any

import keras

from tfmulti.keras_patches.model_structure import function_of, layers_of, operations_of
from tfmulti.training.state.model_checks import optimizers_of
from tfmulti.training.verification.compared import is_compared

# Methods that these packages define are known.
_KNOWN = ("keras", "tfmulti")
# These operations of a functional model compute each element, and so each row, by itself.
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
    """Returns the names of a compiled model's parts that are not known, such as `the loss f`.

    Known are the parts of tfmulti, and those parts of Keras that were compared with one device. The
    parts may be methods of the step, losses, metrics, layers, operations and optimizers.

    Args:
        model: the compiled model.
    """
    found = []
    for name in ("train_step", "compute_loss", "compute_metrics"):
        if _is_own_method(model, name):
            found.append(name)
    for loss in keras.tree.flatten(getattr(model, "loss", None)):
        if _is_own(_loss_of(loss)) or _is_own(getattr(loss, "fn", None)):
            found.append(f"the loss {_name(loss)}")
    for metric in _metrics_of(model):
        # A metric class of Keras may average a function that has no public name.
        own = type(metric) is not keras.metrics.MeanMetricWrapper and not _is_own(metric)
        function = function_of(metric)
        if _is_own(metric) or (_is_of_user(function) if own else _is_own(function)):
            found.append(f"the metric {_name(metric)}")
    for layer in layers_of(model):
        # A model without a `call` of its own only holds layers.
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
    """Returns a model's metrics, with the single metrics in place of Keras' containers."""
    found: list[Any] = []
    for metric in model.metrics:
        found += getattr(metric, "metrics", None) or [metric]
    return found


def _is_own_method(model: keras.Model, name: str) -> bool:
    """Returns whether a method of the model is the user's own."""
    function = getattr(type(model), name, None)
    module = getattr(function, "__module__", "keras")
    return str(module).partition(".")[0] not in _KNOWN


def _calls_of_its_own(model: keras.Model) -> bool:
    """Returns whether the model has a `call` of the user's own."""
    return _is_own_method(model, "call")


def _loss_of(loss: Any) -> Any:
    """Returns a loss for the name that `compile` was given, or anything else as it is."""
    return keras.losses.get(loss) if isinstance(loss, str) else loss


def _is_own(thing: Any) -> bool:
    """Returns whether a function or an object of a class is not known."""
    if thing is None:
        return False
    if _is_of_user(thing):
        return True
    # Keras' models only hold layers.
    if _package(thing) == "tfmulti" or isinstance(thing, keras.Model):
        return False
    return not is_compared(thing if hasattr(thing, "__name__") else type(thing))


def _is_of_user(thing: Any) -> bool:
    """Returns whether neither Keras nor tfmulti defines a function or the class of an object."""
    return thing is not None and _package(thing) not in _KNOWN


def _package(thing: Any) -> str:
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return str(module).partition(".")[0]


def _name(thing: Any) -> str:
    """Returns the name of a loss or metric for a message."""
    if isinstance(thing, str):
        return thing
    return str(getattr(thing, "name", None) or getattr(thing, "__name__", type(thing).__name__))

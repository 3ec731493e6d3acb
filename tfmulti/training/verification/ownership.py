"""Finds the parts of a model that are the user's own code, or parts of Keras that nobody compared.

It is unknown how such code treats the rows of a batch. So a model with such parts is compared with
one device by default.
"""

from __future__ import annotations

from typing import Any

import keras

from tfmulti.keras_patches.model_structure import (
    activations_of,
    function_of,
    input_rank_of,
    is_along_rows,
    layers_of,
    method_of,
    operations_of,
)
from tfmulti.training.state.model_checks import optimizers_of
from tfmulti.training.verification.compared import is_compared, names

# Methods that these packages define are known.
_KNOWN = ("keras", "tfmulti")
# These operations of a functional model compute each element, and so each row, by itself.
_BY_ELEMENT = names(
    "Abs Absolute Add Cast Clip Cos Divide Exp Log Log1p Maximum Minimum Multiply Negative Power "
    "Relu Sigmoid Sin Sqrt Square Subtract Tanh TrueDivide"
)

# This regularizer compares the rows with each other.
_BETWEEN_ROWS = (keras.regularizers.OrthogonalRegularizer,)


def own_parts(model: keras.Model) -> list[str]:
    """Returns the names of a compiled model's parts that are not known, such as `the loss f`.

    Known are the parts of tfmulti, and those parts of Keras that were compared with one device. The
    parts may be methods of the step, losses, metrics, layers, operations and optimizers.
    """
    methods = ("train_step", "compute_loss", "compute_metrics")
    parts = [name for name in methods if is_of_user(method_of(model, name))]
    for loss in keras.tree.flatten(getattr(model, "loss", None)):
        function = keras.losses.get(loss) if isinstance(loss, str) else loss
        is_own = _is_own(function) or _is_own(getattr(loss, "fn", None))
        if is_own or is_along_rows(loss, _rank_of_outputs(model)):
            parts.append(f"the loss {_name(loss)}")
    for metric in _metrics_of(model):
        # A metric class of Keras may average a function that has no public name.
        is_wrapper = type(metric) is keras.metrics.MeanMetricWrapper
        function = function_of(metric)
        is_own = _is_own(metric) or (_is_own(function) if is_wrapper else is_of_user(function))
        if is_own or is_along_rows(metric, _rank_of_outputs(model)):
            parts.append(f"the metric {_name(metric)}")
    parts += own_layers(model)
    for optimizer in optimizers_of(model):
        if _is_own(optimizer):
            parts.append(f"the optimizer {type(optimizer).__name__}")
    return parts


def own_layers(model: keras.Model) -> list[str]:
    """Returns the names of a model's layers and operations that are not known; see `own_parts`."""
    parts = []
    for layer in layers_of(model):
        # A model without a `call` of its own only holds layers.
        only_holds = layer is model and not is_of_user(method_of(model, "call"))
        is_own = isinstance(layer, keras.layers.Lambda) or (_is_own(layer) and not only_holds)
        # An axis that is counted from the end may be the first one.
        rank = input_rank_of(layer)
        own_activation = any(map(_is_own_activation, activations_of(layer)))
        # A recurrent layer may have a cell that is no layer, and so none of `layers_of`.
        held = (getattr(layer, "activity_regularizer", None), getattr(layer, "cell", None))
        is_own = is_own or any(map(is_of_user, held)) or isinstance(held[0], _BETWEEN_ROWS)
        # An eager gradient does not tell which entries of a table several replicas have looked up.
        is_sparse = model.run_eagerly and getattr(layer, "sparse", False)
        if is_own or own_activation or is_sparse or is_along_rows(layer, rank):
            parts.append(f"the layer {layer.name}")
    for operation in operations_of(model):
        if is_of_user(operation) or type(operation).__name__ not in _BY_ELEMENT:
            parts.append(f"the operation {type(operation).__name__}")
    return parts


def _is_own_activation(function: Any) -> bool:
    """Returns whether an activation is the user's own. Those of TensorFlow are operations."""
    return _package(function) not in (*_KNOWN, "tensorflow")


def _rank_of_outputs(model: keras.Model) -> int | None:
    """Returns the number of axes of a model's first output, or None if it is not known."""
    outputs = getattr(model, "outputs", None)
    return len(outputs[0].shape) if outputs else None


def _metrics_of(model: keras.Model) -> list[Any]:
    """Returns a model's metrics, with the single metrics in place of Keras' containers."""
    metrics: list[Any] = []
    for metric in model.metrics:
        metrics += getattr(metric, "metrics", None) or [metric]
    return metrics


def _is_own(part: Any) -> bool:
    """Returns whether a function or an object of a class is not known."""
    if part is None:
        return False
    if is_of_user(part) or "call" in getattr(part, "__dict__", ()):
        return True
    # Keras' models only hold layers.
    if _package(part) == "tfmulti" or isinstance(part, keras.Model):
        return False
    return not is_compared(part if hasattr(part, "__name__") else type(part))


def is_of_user(part: Any) -> bool:
    """Returns whether neither Keras nor tfmulti defines a function or the class of an object."""
    return part is not None and _package(part) not in _KNOWN


def _package(part: Any) -> str:
    module = getattr(part, "__module__", None) or type(part).__module__
    return str(module).partition(".")[0]


def _name(part: Any) -> str:
    """Returns the name of a loss or metric for a message."""
    if isinstance(part, str):
        return part
    return str(getattr(part, "name", None) or getattr(part, "__name__", type(part).__name__))

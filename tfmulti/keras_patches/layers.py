"""Patches that make layers and custom steps right inside a step of several replicas.

A value that the user's own code assigns to a variable becomes the value of the global batch.
Layers that compare the rows of a batch get the rows of all replicas.

| what | name | upstream | can go when |
|---|---|---|---|
| states of steps | public: `keras.Variable.assign`; private: `DistributedVariable.assign`, `assign_add`, `assign_sub` | none | a variable that a step changes gets the value of the global batch |
| labels of rows | public: `Layer.__call__`; private: `get_stateless_scope` | none | never: it records which rows a layer's outputs belong to |
| layers that look at all rows | public: `call` of `batch_dependent_layers.LAYERS` and of AugMix | none | these layers know about replicas |
| custom steps | public: `tf.nn.compute_average_loss`, `tf.nn.scale_regularization_loss`, `tf.clip_by_global_norm`, `tf.linalg.global_norm` | none | these functions know about replicas |
| traces of layers | public: `tf.distribute.ReplicaContext.merge_call`; private: `Layer._losses`, `_loss_ids` | none | replicas of one process are traced one after the other |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope
from tensorflow.python.distribute.values import DistributedVariable

from tfmulti.distribution import (
    batch_dependent_layers,
    custom_steps,
    global_values,
    row_labels,
)
from tfmulti.distribution.replica_slice import (
    PerThread,
    partial,
)
from tfmulti.keras_patches.model_structure import is_seed, layers_of, own_variables
from tfmulti.keras_patches.patching import in_replica_slice, is_of_keras, replace


def install() -> None:
    """Patches layers, assignments to variables, and TensorFlow's functions for custom steps."""
    replace(tf.distribute.ReplicaContext, "merge_call", _keeping_traces)
    replace(keras.layers.Layer, "__call__", _labelled_layer)
    for variable in (keras.Variable, DistributedVariable):
        for name in ("assign", "assign_add", "assign_sub"):
            # The other assigning methods of `keras.Variable` call its `assign`.
            if name == "assign" or variable is DistributedVariable:
                replace(variable, name, _assigned)
    for owner, name, function in custom_steps.FUNCTIONS:
        replace(owner, name, in_replica_slice(function))
    for layer in batch_dependent_layers.LAYERS:
        replace(layer, "call", in_replica_slice(batch_dependent_layers.mixed))
    replace(keras.layers.AugMix, "call", batch_dependent_layers.refuse_choices)


def states_of_its_own(model: keras.Model) -> dict[int, str]:
    """Returns the variables that the user's own code may change in a step.

    Variables of layers are "layer", and those of metrics that are not Keras' own are "metric".
    Variables of Keras' own metrics have an empty kind, since patches of Keras handle them.

    Returns:
        The kind of each Keras variable, by the variable's id, for `ReplicaSlice.states`.
    """
    found: dict[int, str] = {}
    for layer in layers_of(model):
        found |= {id(v): "layer" for v in own_variables(layer) if not is_seed(v)}
    metrics = [*model.metrics, *keras.Model.metrics.fget(model)]
    while metrics:
        metric = metrics.pop()
        # Keras holds the metrics that `compile` was given in one metric that contains them.
        inner = list(getattr(metric, "metrics", ()))
        metrics += inner
        if not inner:
            kind = "" if is_of_keras(type(metric)) else "metric"
            found |= {id(v): kind for v in metric.variables}
    return found


def _assigned(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an assigning method that stores the value of the global batch in a custom state."""

    def assign(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        replica_slice = partial()
        # Assignments within Keras' own layers stay: other patches handle the states of those.
        asks = replica_slice is not None and not _in_layer_of_keras.get()
        kind = replica_slice.states.get(id(self)) if replica_slice is not None and asks else None
        if replica_slice is not None and kind == "layer":
            value = global_values.of_one_device(replica_slice, value)
        elif replica_slice is not None and kind == "metric":
            value = global_values.part_of_sum(replica_slice, value)
        return original(self, value, *args, **kwargs)

    return assign


def _keeping_traces(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `merge_call` that keeps what this replica's trace has left on the layers.

    While one replica waits in `merge_call`, the other replicas of the process trace the same
    layers and leave their own losses there. Afterwards each layer gets this replica's back.
    """

    def merge_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        replica_slice = partial()
        if replica_slice is None or replica_slice.model is None or tf.executing_eagerly():
            return original(self, *args, **kwargs)
        left = [(layer, _left_by_trace(layer)) for layer in layers_of(replica_slice.model)]
        found = original(self, *args, **kwargs)
        for layer, state in left:
            vars(layer).update(state)
        return found

    return merge_call


def _left_by_trace(layer: Any) -> dict[str, Any]:
    """Returns copies of the attributes in which a layer holds tensors of the traced graph.

    Keras' own layers hold tensors of a graph in their losses only.
    """
    losses = {"_losses": list(layer._losses), "_loss_ids": set(layer._loss_ids)}
    if is_of_keras(type(layer)):
        return losses
    found = {}
    for name, value in vars(layer).items():
        parts = value.values() if isinstance(value, dict) else value
        many = isinstance(value, (dict, list, tuple))
        if any(map(_is_symbolic, parts if many else [value])):
            found[name] = type(value)(value) if type(value) in (dict, list) else value
    return found | losses


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and hasattr(value, "graph")


_in_layer_of_keras = PerThread(False)


def _labelled_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `__call__` that labels outputs whose rows depend on the same input row alone."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = type(self).__module__.startswith("keras.src.layers.")
        with _in_layer_of_keras.set_to(own and not isinstance(self, keras.layers.Lambda)):
            outputs = original(self, *args, **kwargs)
        if row_labels.are_kept() and _works_by_rows(self):
            row_labels.mark_call((args, kwargs, _given_weights(self)), outputs)
        return outputs

    return call


def _given_weights(layer: Any) -> list[Any]:
    """Returns the tensors that stand for a layer's weights in `stateless_call`."""
    if not in_stateless_scope():
        return []
    found = map(get_stateless_scope().get_current_value, layer.trainable_variables)
    return [value for value in found if value is not None]


def _works_by_rows(layer: Any) -> bool:
    """Returns whether a layer and its sublayers are Keras' own, which compute row by row.

    Keras' layers that need other rows count, too: `batch_dependent_layers` and the patch of
    BatchNormalization give them the rows of all replicas.
    """
    return all(
        type(part).__module__.startswith("keras.src.layers.")
        and not isinstance(part, keras.layers.Lambda)
        and is_of_keras(getattr(part, "activation", keras.activations.linear))
        for part in layers_of(layer)
    )

"""Patches that make layers and custom steps right inside a step of several replicas.

Layers that compare the rows of a batch get the rows of all replicas.

| what | name | upstream | can go when |
|---|---|---|---|
| labels of rows | public: `Layer.__call__`; private: `get_stateless_scope`, `get_keras_mask`, `set_keras_mask` | none | never: it records which rows a layer's outputs belong to |
| layers that look at all rows | public: `call` of `batch_dependent_layers.LAYERS`, AugMix and SpectralNormalization | none | these layers know about replicas |
| conditions | private: `tensorflow.python.ops.cond.cond`, which `tf.cond` and AutoGraph's `if` call | none | never: all replicas must take the branch of one device |
| custom steps | public: `tf.nn.compute_average_loss`, `tf.nn.scale_regularization_loss`, `tf.clip_by_global_norm`, `tf.linalg.global_norm`, `tf.nn.ctc_loss` | none | these functions know about replicas |
| traces of layers | public: `tf.distribute.ReplicaContext.merge_call`; private: `Layer._losses`, `_loss_ids` | none | replicas of one process are traced one after the other |
"""  # noqa: E501

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope
from tensorflow.python.eager import record
from tensorflow.python.ops import cond as cond_module

from tfmulti.distribution import (
    batch_dependent_layers,
    custom_gradients,
    custom_steps,
    global_values,
    python_attributes,
    row_labels,
)
from tfmulti.distribution.replica_slice import PerThread, ReplicaSlice, partial
from tfmulti.distribution.row_rules import Kind
from tfmulti.keras_patches.gradients import is_lost
from tfmulti.keras_patches.model_structure import (
    all_metric_variables,
    has_own_activation,
    input_rank_of,
    is_along_rows,
    is_seed,
    layers_of,
    operations_of,
    own_variables,
)
from tfmulti.keras_patches.patching import in_replica_slice, is_of_keras, replace


def install() -> None:
    """Patches layers, and TensorFlow's functions for custom steps."""
    replace(tf.distribute.ReplicaContext, "merge_call", in_replica_slice(_merge_call))
    replace(keras.layers.Layer, "__call__", _labelled_layer)
    replace(cond_module, "cond", in_replica_slice(_condition))
    for owner, name, function in custom_steps.FUNCTIONS:
        replace(owner, name, in_replica_slice(_off_tapes(function)))
    for layer in batch_dependent_layers.LAYERS:
        replace(layer, "call", in_replica_slice(batch_dependent_layers.mixed))
    replace(keras.layers.AugMix, "call", batch_dependent_layers.refuse_choices)
    once = in_replica_slice(batch_dependent_layers.changed_once)
    replace(keras.layers.SpectralNormalization, "call", once)


def _off_tapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that leaves gradients as they are if a tape may differentiate them again.

    A mean over the replicas has no gradient by the rows of each. The labels tell how the gradients
    of the global batch follow from the operations.
    """
    if function not in custom_steps.OF_GRADIENTS:
        return function

    def call(
        original: Callable[..., Any], replica_slice: ReplicaSlice, *args: Any, **kw: Any
    ) -> Any:
        # The gradients of lookups have no label.
        has_lookups = any(isinstance(g, tf.IndexedSlices) for g in tf.nest.flatten((args, kw)))
        may_differentiate = record.could_possibly_record() and not has_lookups
        if may_differentiate and global_values.are_known(replica_slice):
            return original(*args, **kw)
        return function(original, replica_slice, *args, **kw)

    return call


def states_of_its_own(model: keras.Model) -> dict[int, str]:
    """Returns the variables that the user's own code may change in a step.

    Returns:
        The kind of each Keras variable, "layer" or "metric", by the variable's id, for
        `ReplicaSlice.states`.
    """
    kinds: dict[int, str] = {}
    for layer in layers_of(model):
        kinds |= {id(v): "layer" for v in own_variables(layer) if not is_seed(v)}
    return kinds | {id(v): "metric" for v in all_metric_variables(model)}


def _condition(
    original: Callable[..., Any], replica_slice: ReplicaSlice, pred: Any, *args: Any, **kwargs: Any
) -> Any:
    """Makes a condition of the user's own that of the global batch, for `tf.cond`.

    So all replicas take the same branch. A condition of an assertion stays that of each replica,
    and so does one that depends on the number of rows alone, which chooses how to compute them.
    """
    if (
        in_layer_of_keras.get()
        or kwargs.get("name") == "AssertGuard"
        or not global_values.are_known(replica_slice)
    ):
        return original(pred, *args, **kwargs)
    kind = row_labels.label_of(pred).kind
    if kind in (Kind.MEAN, Kind.SUM, Kind.GLOBAL, Kind.MIXED):
        pred = global_values.of_one_device(replica_slice, pred)
    elif kind is not Kind.ALIKE:
        return original(pred, *args, **kwargs)

    def in_all(branch: Any) -> Any:
        return row_labels.taken_by_all(branch) if callable(branch) else branch

    args = tuple(map(in_all, args))
    return original(pred, *args, **{name: in_all(value) for name, value in kwargs.items()})


def _merge_call(
    original: Callable[..., Any], replica_slice: ReplicaSlice, *args: Any, **kwargs: Any
) -> Any:
    """Runs `merge_call`, and keeps what this replica's step has left on layers.

    While one replica waits in `merge_call`, the other replicas of the process run the Python code
    of the same layers, and leave their own losses and numbers there. Afterwards each layer gets
    this replica's back.
    """
    numbers = python_attributes.read(owner for owner, _ in replica_slice.attributes)
    layers = [] if replica_slice.model is None else layers_of(replica_slice.model)
    states = [(layer, _left_by_step(layer)) for layer in layers]
    result = original(*args, **kwargs)
    for layer, state in states:
        _put_back(layer, state)
    python_attributes.restore(numbers)
    return result


def _left_by_step(layer: Any) -> dict[str, tuple[Any, Any]]:
    """Returns the attributes in which a layer holds, or collects, tensors of the step.

    Keras' own layers hold such tensors in their losses only. In eager mode nothing tells which
    other tensors belong to the step.

    Returns:
        By the attribute's name the value, and a copy of its items if it is a list, dict or set.
    """
    names = {"_losses", "_loss_ids"}
    if not (is_of_keras(type(layer)) or tf.executing_eagerly()):
        names |= {
            name
            for name, value in vars(layer).items()
            if name not in _of_any_layer() and _holds_tensors(value)
        }
    return {name: (vars(layer)[name], _copied(vars(layer)[name])) for name in names}


@functools.cache
def _of_any_layer() -> frozenset[str]:
    """Returns the attributes that Keras gives each layer and model."""
    return frozenset([*vars(keras.Model()), *vars(keras.layers.Layer())])


def _holds_tensors(value: Any) -> bool:
    """Returns whether a value is a tensor of a graph, holds one, or is an empty list or dict."""
    if isinstance(value, (dict, list)) and not value:
        return True
    items = value.values() if isinstance(value, dict) else value
    return any(map(_is_symbolic, items if isinstance(value, (dict, list, tuple)) else [value]))


def _copied(value: Any) -> Any:
    """Returns a copy of a list, dict or set, without Keras' tracking; None for other values."""
    kind = next((kind for kind in (list, dict, set) if isinstance(value, kind)), None)
    return None if kind is None else kind(value)


def _put_back(layer: Any, state: dict[str, tuple[Any, Any]]) -> None:
    """Gives a layer back what `_left_by_step` returned."""
    for name, (value, items) in state.items():
        # These methods bypass the tracking of Keras' lists and dicts.
        if isinstance(items, list):
            list.__setitem__(value, slice(None), items)
        elif isinstance(items, (dict, set)):
            type(items).clear(value)
            type(items).update(value, items)
        vars(layer)[name] = value


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and hasattr(value, "graph")


# Whether this thread runs the code of one of Keras' own layers.
in_layer_of_keras = PerThread(False)


def _labelled_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `__call__` that labels outputs whose rows depend on the same input row alone.

    If the inputs depend on other rows, such a layer gets the rows as one device computes them.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        replica_slice = partial()
        works_by_rows = row_labels.are_kept() and _works_by_rows(self, args)
        needs_rows = works_by_rows or isinstance(self, _LOOPS_AND_STATISTICS)
        if replica_slice is not None and needs_rows and not custom_gradients.is_inside.get():
            rows = functools.partial(_rows_of_one_device, replica_slice)
            args, kwargs = tf.nest.map_structure(rows, (args, kwargs))
        with in_layer_of_keras.set_to(_is_layer_of_keras(self)):
            outputs = original(self, *args, **kwargs)
        if works_by_rows:
            row_labels.mark_call((args, kwargs, _given_weights(self)), outputs)
        return outputs

    return call


def _rows_of_one_device(replica_slice: ReplicaSlice, value: Any) -> Any:
    """Returns this replica's rows as one device computes them, with the mask that Keras gave."""
    of_one_device = functools.partial(
        global_values.rows_of_one_device, replica_slice, is_lost=is_lost
    )
    rows = of_one_device(value)
    mask = get_keras_mask(value)
    if mask is not None:
        mask_of_rows = of_one_device(mask)
        if rows is value and mask_of_rows is not mask:
            rows = tf.identity(value)
        set_keras_mask(rows, mask_of_rows)
    return rows


# The statistics and loops of these layers cannot be computed again from other values.
_LOOPS_AND_STATISTICS = (keras.layers.BatchNormalization, keras.layers.RNN)


# A Lambda runs a function of the user's own. A MelSpectrogram takes the maximum of the whole batch.
_TREATED_AS_OWN = (keras.layers.Lambda, keras.layers.MelSpectrogram)


def _is_layer_of_keras(layer: Any) -> bool:
    """Returns whether the code of a layer is Keras', and treats each row by itself."""
    of_keras = type(layer).__module__.startswith("keras.src.layers.")
    # A recurrent layer may have a cell that is no layer, and an object may have its own `call`.
    has_own_cell = not isinstance(getattr(layer, "cell", layer), keras.layers.Layer)
    has_own_call = has_own_cell or "call" in vars(layer)
    return of_keras and not has_own_call and not isinstance(layer, _TREATED_AS_OWN)


def has_own_layers(model: keras.Model) -> bool:
    """Returns whether a model has layers, a `call` or activations of the user's own.

    An operation of a functional model counts, too. It may call a function of the user's own, as
    `keras.ops.scan` does. So does a layer that computes along the axis of the rows.
    """
    if operations_of(model):
        return True
    for layer in layers_of(model):
        # Keras' models call their layers in order.
        only_holds = isinstance(layer, keras.Model) and is_of_keras(type(layer).call)
        if has_own_activation(layer) or not (only_holds or _is_layer_of_keras(layer)):
            return True
        if is_along_rows(layer, input_rank_of(layer)):
            return True
    return False


def _given_weights(layer: Any) -> list[Any]:
    """Returns the tensors that replace a layer's weights in `stateless_call`."""
    if not in_stateless_scope():
        return []
    values_of_weights = map(get_stateless_scope().get_current_value, layer.trainable_variables)
    return [value for value in values_of_weights if value is not None]


def _works_by_rows(layer: Any, args: tuple[Any, ...]) -> bool:
    """Returns whether a layer and its sublayers are Keras' own, which compute row by row.

    Keras' layers that need other rows count, too: `batch_dependent_layers` and the patch of
    BatchNormalization give them the rows of all replicas.
    """
    ranks = [value.shape.rank for value in tf.nest.flatten(args) if isinstance(value, tf.Tensor)]
    return all(
        _is_layer_of_keras(part)
        and not has_own_activation(part)
        and not is_along_rows(part, ranks[0] if ranks and part is layer else None)
        for part in layers_of(layer)
    )

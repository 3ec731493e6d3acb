"""Optimizers that get the gradient of the global batch, and update each replica by itself.

| what | private name | upstream | can go when |
|---|---|---|---|
| `take_reduced_gradients` | `TFOptimizer._all_reduce_sum_gradients`, `_backend_update_step`, `_apply_weight_decay`, `_backend_increment_gradient_accumulators`, `_overwrite_model_variables_with_average_value` | keras#20585 | optimizers take global gradients, and update without `merge_call` |
| `_updated` | `BaseOptimizer._get_variable_index`, `Adam._momentums`, `_velocities` | none | Keras' SGD updates by one kernel, and Keras' Adam computes only once what all variables share |
| `_compute_before_waits` | `tf.Operation._add_control_inputs` | none | TensorFlow has a public way to order operations that are there |
"""  # noqa: E501

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfmulti.distribution import (
    collectives,
    global_values,
)
from tfmulti.distribution.replica_slice import (
    partial,
)
from tfmulti.errors import ModelError
from tfmulti.keras_patches.classes import derived_class
from tfmulti.keras_patches.cpu_speed import updates
from tfmulti.keras_patches.cpu_speed.installation import is_enabled
from tfmulti.keras_patches.patching import replace

Gradients = Sequence[Any]


def install() -> None:
    replace(TFOptimizer, "_all_reduce_sum_gradients", _unless_unknown)
    for name in (
        "_backend_update_step",
        "_apply_weight_decay",
        "_backend_increment_gradient_accumulators",
        "_overwrite_model_variables_with_average_value",
    ):
        replace(TFOptimizer, name, _on_each_replica)


def _unless_unknown(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(optimizer: Any, grads_and_vars: Any) -> Any:
        if partial() is not None:
            raise ModelError(
                f"the train_step applies gradients with a {type(optimizer).__name__} that is not "
                "part of the model, so they would be summed, not averaged. Keep it as an "
                "attribute of the model."
            )
        return original(optimizer, grads_and_vars)

    return reduce


class _UpdatesReplica:
    """An optimizer whose gradients are global: each replica updates its own copy by itself.

    Keras reduces here, and updates in cross-replica context (`merge_call`), which cannot be
    inside a condition: gradient accumulation and overwriting by averages are conditions.
    """

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
        return list(grads_and_vars)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        step = super().update_step  # type: ignore[misc]
        context = tf.distribute.get_replica_context()
        several = context is not None and context.num_replicas_in_sync > 1
        update = updates.of_step(step) if several and is_enabled() else None
        if update is None or not update(self, gradient, _updated(self, variable), learning_rate):
            step(gradient, variable, learning_rate)


def _updated(optimizer: Any, variable: Any) -> list[Any]:
    """Returns a variable and what an SGD or an Adam keeps for it."""
    index = optimizer._get_variable_index(variable)
    if isinstance(optimizer, keras.optimizers.Adam):
        return [variable, optimizer._momentums[index], optimizer._velocities[index]]
    return [variable, optimizer.momentums[index]] if optimizer.momentum else [variable]


def _on_each_replica(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Keras' method for all backends in place of TensorFlow's, for `_UpdatesReplica`.

    It stands where TensorFlow's stood, so what an optimizer's class puts around it stays.
    """
    plain = getattr(BaseOptimizer, original.__name__)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = tf.distribute.get_replica_context()
        several = context is not None and context.num_replicas_in_sync > 1
        if several and isinstance(self, _UpdatesReplica):
            return plain(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return method


class _ReducesFirst(_UpdatesReplica):
    _tfmulti_reduce: Callable[[Gradients], list[Any]]
    _tfmulti_take: Callable[[Any, Gradients, Any], bool]

    def apply(self, grads: Gradients, trainable_variables: Any = None) -> Any:
        if tf.distribute.get_replica_context() is not None:
            grads = _gradients_of_global_batch(grads)
            if self._tfmulti_take(self, grads, trainable_variables):
                return None
            _compute_before_waits(grads)
            grads = self._tfmulti_reduce(grads)
        with updates.of_all_variables() if is_enabled() else contextlib.nullcontext():
            return super().apply(grads, trainable_variables)  # type: ignore[misc]


def _gradients_of_global_batch(gradients: Gradients) -> list[Any]:
    """Returns gradients that a step changed by itself such that their mean over replicas is right.

    A gradient as the tape gives it stays. One that was clipped or normalized on each replica would
    not be that of the global batch.
    """
    share = partial()
    if share is None or not global_values.are_known(share):
        return list(gradients)
    return [
        global_values.averaged(share, gradient) if isinstance(gradient, tf.Tensor) else gradient
        for gradient in gradients
    ]


def _compute_before_waits(gradients: Gradients) -> None:
    """Has the gradients of variables computed before a wait for other workers that follows them.

    A wait is that of a BatchNormalization's gradient: the layers before it need what comes of it,
    and the gradients of the variables behind it need not wait. A worker that left these for later
    would itself be waited for.
    """
    waits = set(collectives.waits())
    if not waits:
        return
    found, rest = set(), [g.op for g in gradients if isinstance(g, tf.Tensor)]
    for operation in rest:  # it grows: a regularizer's part is added to the layer's
        found.add(operation)
        if operation.type == "AddN":
            rest += [value.op for value in operation.inputs]
    ready: list[tf.Operation] = []
    for operation in tf.compat.v1.get_default_graph().get_operations():
        if operation in found:
            ready.append(operation)
        elif operation in waits:
            operation._add_control_inputs(ready)
            ready = []


def take_reduced_gradients(
    optimizer: keras.optimizers.Optimizer,
    reduce: Callable[[Gradients], list[Any]],
    take: Callable[[Any, Gradients, Any], bool],
) -> None:
    """Makes `optimizer.apply` reduce the gradients by `reduce` first, and never again.

    Clipping, finite checks and loss scaling inside the optimizer then see the gradient of
    the global batch; Keras reduces after them. Where `take(optimizer, gradients, variables)`
    returns True, it has kept them and nothing is updated. The optimizer keeps its class'
    name and module, so that it is saved as before.
    """
    for inner in inner_optimizers(optimizer):
        _mix_in(inner, _UpdatesReplica)
    _mix_in(optimizer, _ReducesFirst)
    vars(optimizer)["_tfmulti_reduce"] = reduce
    vars(optimizer)["_tfmulti_take"] = take


def inner_optimizers(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Returns the optimizers that another one hands its gradients to."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return list(getattr(optimizer, "optimizers", [])) if inner is None else [inner]


def _mix_in(thing: Any, mixin: type) -> None:
    if not isinstance(thing, mixin):
        object.__setattr__(thing, "__class__", derived_class(type(thing), (mixin, type(thing))))

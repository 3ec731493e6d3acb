"""Optimizers that get the gradient of the global batch and update each replica's copy by itself.

Keras' `apply` clips the gradients of each replica and then sums them. A patched optimizer reduces
the gradients first, so clipping, finite checks and loss scaling see the gradient of the global
batch. If all replicas are CPU devices of this process, one computation then updates their copies of
the variables. Otherwise each replica computes the same update on its own copy. That needs no
`merge_call`, and may stand inside a condition.

| what | private name | upstream | can go when |
|---|---|---|---|
| `take_reduced_gradients` | `TFOptimizer._all_reduce_sum_gradients`, `_backend_update_step`, `_apply_weight_decay`, `_backend_increment_gradient_accumulators`, `_backend_apply_gradients`, `_overwrite_model_variables_with_average_value` | keras#20585 | optimizers take global gradients, and update without `merge_call` |
| `_ReducesFirst` | `BaseOptimizer._trainable_variables` | none | an optimizer tells for which variables it is built |
| `_updated` | `BaseOptimizer._get_variable_index`, `Adam._momentums`, `_velocities` | none | Keras' SGD updates by one kernel, and Keras' Adam computes only once what all variables share |
| `_in_own_scope` | `TFOptimizer.add_variable_from_reference` | none | Keras enters the scope by itself |
| `_compute_before_waits` | `tf.Operation._add_control_inputs` | none | TensorFlow has a public way to order operations that are there |
"""  # noqa: E501

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfmulti.distribution import collectives, custom_steps, global_values, replica_threads
from tfmulti.distribution.replica_slice import ReplicaSlice, partial
from tfmulti.distribution.strategies import run_on_replicas
from tfmulti.errors import ModelError
from tfmulti.keras_patches.classes import derived_class
from tfmulti.keras_patches.cpu_speed import updates
from tfmulti.keras_patches.cpu_speed.installation import is_enabled
from tfmulti.keras_patches.patching import in_replica_slice, is_of_keras, replace
from tfmulti.keras_patches.tracing import eager_mode
from tfmulti.keras_patches.variables import strategy_of

Gradients = Sequence[Any]


def install() -> None:
    """Patches the methods by which Keras' optimizers reduce gradients and update variables."""
    replace(TFOptimizer, "_all_reduce_sum_gradients", in_replica_slice(_refuse_unknown))
    replace(TFOptimizer, "add_variable_from_reference", _in_own_scope)
    replace(TFOptimizer, "_backend_apply_gradients", _refuse_outside_scope)
    for name in (
        "_backend_update_step",
        "_apply_weight_decay",
        "_backend_increment_gradient_accumulators",
        "_overwrite_model_variables_with_average_value",
    ):
        replace(TFOptimizer, name, _on_each_replica)


def _refuse_unknown(
    original: Callable[..., Any], replica_slice: ReplicaSlice, optimizer: Any, grads_and_vars: Any
) -> Any:
    """Raises ModelError for an optimizer outside the model, instead of Keras' reduction."""
    raise ModelError(
        f"the train_step applies gradients with a {type(optimizer).__name__} that is not part of "
        "the model, so they would be summed, not averaged. Keep it as an attribute of the model."
    )


def _in_own_scope(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of an optimizer that runs in the scope of the optimizer's strategy.

    So the user can call `optimizer.build` outside the scope.
    """

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_of(self)
        if strategy is None or tf.distribute.has_strategy():
            return original(self, *args, **kwargs)
        with strategy.scope():
            return original(self, *args, **kwargs)

    return method


def _refuse_outside_scope(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that refuses an optimizer of no strategy for variables that have one.

    Such an optimizer, made by a callback for example, would not find the copies of a variable.
    """

    @functools.wraps(original)
    def method(self: Any, grads: Gradients, trainable_variables: Any) -> Any:
        for variable in trainable_variables if strategy_of(self) is None else ():
            if isinstance(variable.value, tf.distribute.DistributedValues):
                raise ModelError(
                    f"the optimizer {type(self).__name__} updates the variable {variable.path!r}, "
                    "but was made outside the strategy's scope. Make it in `with strategy.scope()`."
                )
        return original(self, grads, trainable_variables)

    return method


def _assigning_copies(name: str, of_rows: str) -> Callable[..., None]:
    """Returns a method by which an optimizer outside a replica changes the copies of all replicas.

    `DistributedVariable.assign` would take four operations for each copy, and it refuses
    `tf.IndexedSlices`.

    Args:
        name: the name of the method, of an optimizer and of a `tf.Variable`.
        of_rows: the method of a `tf.Variable` that takes `tf.IndexedSlices`.
    """

    def method(self: Any, variable: Any, value: Any) -> None:
        if not (tf.distribute.in_cross_replica_context() and _has_several_replicas()):
            getattr(super(_UpdatesReplica, self), name)(variable, value)
            return
        variable = variable.value if isinstance(variable, keras.Variable) else variable
        value = tf.cast(value, variable.dtype)
        for copy in tf.distribute.get_strategy().experimental_local_results(variable):
            with tf.device(copy.device):
                if isinstance(value, tf.IndexedSlices):
                    getattr(copy, of_rows)(value)
                else:
                    getattr(copy, name)(value, read_value=False)

    return method


class _UpdatesReplica:
    """Mixin for an optimizer that gets global gradients, which are the same on all replicas.

    In a replica's context it updates the copy of that replica, otherwise those of all replicas.
    Keras reduces the gradients in `_all_reduce_sum_gradients` and updates in cross-replica context
    by `merge_call`. That cannot stand inside a condition, and Keras accumulates gradients and
    overwrites variables by their averages inside conditions.
    """

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
        """Returns the gradients as they are, since they are reduced already."""
        return list(grads_and_vars)

    def _backend_apply_gradients(self, grads: Gradients, trainable_variables: Any) -> None:
        """Clips the gradients and updates the variables, for all replicas at once if it can."""
        apply = super()._backend_apply_gradients  # type: ignore[misc]

        def update(_: Any = None) -> None:
            at_once = updates.of_all_variables() if is_enabled() else contextlib.nullcontext()
            with at_once:
                apply(grads, trainable_variables)

        context = tf.distribute.get_replica_context()
        if context is not None and _can_update_copies(self, context.strategy):
            context.merge_call(update)
        else:
            update()

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates a variable, with several replicas by the faster forms of `cpu_speed`."""
        step = super().update_step  # type: ignore[misc]
        update = updates.of_step(step) if _has_several_replicas() and is_enabled() else None
        if update is None or not update(self, gradient, _updated(self, variable), learning_rate):
            # Keras' TensorFlow backend gives the tf.Variable, whose methods a user may call.
            variable = variable.value if isinstance(variable, keras.Variable) else variable
            step(gradient, variable, learning_rate)

    assign = _assigning_copies("assign", "scatter_update")
    assign_add = _assigning_copies("assign_add", "scatter_add")
    assign_sub = _assigning_copies("assign_sub", "scatter_sub")


def _updated(optimizer: Any, variable: Any) -> list[Any]:
    """Returns a variable and the optimizer state that SGD or Adam keeps for it."""
    index = optimizer._get_variable_index(variable)
    if isinstance(optimizer, keras.optimizers.Adam):
        return [variable, optimizer._momentums[index], optimizer._velocities[index]]
    return [variable, optimizer.momentums[index]] if optimizer.momentum else [variable]


def _has_several_replicas() -> bool:
    """Returns whether the strategy of the current step or update has several replicas."""
    return bool(tf.distribute.get_strategy().num_replicas_in_sync > 1)


def _on_each_replica(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that takes Keras' backend-neutral form for an `_UpdatesReplica`.

    The method replaces that of `TFOptimizer` itself. So an override in an optimizer's class that
    calls `super()` still works.
    """
    plain = getattr(BaseOptimizer, original.__name__)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, _UpdatesReplica) and _has_several_replicas():
            return plain(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return method


class _ReducesFirst(_UpdatesReplica):
    """Mixin for an optimizer whose `apply` reduces the gradients before anything else."""

    _tfmulti_reduce: Callable[[Gradients, list[str]], list[Any]]
    _tfmulti_take: Callable[[Any, Gradients, Any], bool]

    def _is_new_in_step(self) -> bool:
        """Returns whether a step of the user's own runs now, and the optimizer has no slots yet."""
        is_in_step = tf.inside_function() and tf.distribute.get_replica_context() is not None
        return is_in_step and not self.built and not in_stateless_scope()  # type: ignore[attr-defined]

    def build(self, variables: Any) -> None:
        """Makes the slots, once for all replicas if a step of the user's own calls this."""
        if self._is_new_in_step():
            _build(self, variables)
        else:
            super().build(variables)  # type: ignore[misc]

    @property
    def variables(self) -> Any:
        """The variables of the optimizer.

        Raises:
            ModelError: a step reads them before the optimizer is built. Plain Keras finds no slots
                in its first step, and then traces the step once more.
        """
        if self._is_new_in_step():
            raise ModelError(
                "the step reads the variables of an optimizer that is not built yet. Call "
                "optimizer.build(model.trainable_variables) before fit."
            )
        return super().variables  # type: ignore[misc]

    def apply(self, grads: Gradients, trainable_variables: Any = None) -> Any:
        """Reduces the gradients and applies them, unless the `take` function keeps them."""
        strategy = strategy_of(self)
        is_in_step = tf.distribute.has_strategy() and tf.distribute.get_replica_context()
        if strategy is not None and strategy.num_replicas_in_sync > 1 and not is_in_step:
            # A loop of the user's own calls this. Its gradients are those of one device.
            if self._tfmulti_take(self, grads, trainable_variables):
                return None
            if not self.built:  # type: ignore[attr-defined]
                with strategy.scope():
                    self.build(trainable_variables)
            apply = functools.partial(super().apply, grads, trainable_variables)  # type: ignore[misc]
            run_on_replicas(strategy, apply)
            return self.iterations  # type: ignore[attr-defined]
        if tf.distribute.get_replica_context() is not None:
            _refuse_overwritten(trainable_variables or self._trainable_variables)  # type: ignore[attr-defined]
            grads = _gradients_of_global_batch(grads)
            if self._tfmulti_take(self, grads, trainable_variables):
                return None
            _compute_before_waits(grads)
            variables = trainable_variables or ()
            names = [v.path for v in variables] if len(variables) == len(grads) else []
            grads = self._tfmulti_reduce(grads, names)
            if grads and trainable_variables is not None and not self.built:  # type: ignore[attr-defined]
                _build(self, variables)
        with custom_steps.gradients_are_global.set_to(True):
            return super().apply(grads, trainable_variables)  # type: ignore[misc]


def _build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Builds an optimizer in a step, once for all replicas, for the variables that it updates.

    `tf.function` traces a function again if that has made variables. It learns of them from the
    graph of the function, so they are made inside another graph's context.
    """

    def build(strategy: tf.distribute.Strategy) -> None:
        with tf.Graph().as_default(), eager_mode(), strategy.scope():
            optimizer.build(list(variables))

    tf.distribute.get_replica_context().merge_call(build)


def _can_update_copies(optimizer: Any, strategy: tf.distribute.Strategy) -> bool:
    """Returns whether one computation can update the copies of all replicas, and is faster.

    An optimizer inside another one may update in a condition, and a class of the user may do what
    only a replica can do. SGD updates a variable by one operation, so nothing is saved there.
    """
    return (
        replica_threads.are_siblings(strategy)
        and is_of_keras(type(optimizer))
        and isinstance(optimizer, _ReducesFirst)
        and not isinstance(optimizer, keras.optimizers.SGD)
    )


def _gradients_of_global_batch(gradients: Gradients) -> list[Any]:
    """Returns gradients whose mean over the replicas, by rows, is the gradient of one device.

    A gradient stays as the tape gives it. A step may have clipped or normalized a gradient on each
    replica, and the mean of those is wrong. Such a gradient is replaced by one from global values.
    """
    replica_slice = partial()
    if replica_slice is None or not global_values.are_known(replica_slice):
        return list(gradients)
    return [global_values.averaged(replica_slice, gradient) for gradient in gradients]


def _refuse_overwritten(variables: Sequence[Any]) -> None:
    """Raises an error if the rows of a batch are divided and a gradient becomes a variable's value.

    In float8 training the scales follow from the largest value of all rows, forward and backward.

    Raises:
        ModelError: a variable has `overwrite_with_gradient`.
    """
    if partial() is None:
        return
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ModelError(
                f"the variable {variable.path!r} takes its gradient as its value, as in float8 "
                "training. The value follows from all rows of a batch. Train on one device without "
                "microbatches, or without float8."
            )


def _compute_before_waits(gradients: Gradients) -> None:
    """Orders the graph so that gradients are computed before the next wait for other workers.

    The backward pass of a synchronized BatchNormalization waits for the other workers. The
    gradients that stand before that wait in the graph do not depend on it. A worker that postponed
    them would make the other workers wait for it.
    """
    waits = set(collectives.waits())
    if not waits:
        return
    makers, to_visit = set(), [g.op for g in gradients if isinstance(g, tf.Tensor)]
    # The list grows in the loop: AddN adds a regularizer's part to the gradient of the layer.
    for operation in to_visit:
        makers.add(operation)
        if operation.type == "AddN":
            to_visit += [value.op for value in operation.inputs]
    ready: list[tf.Operation] = []
    for operation in tf.compat.v1.get_default_graph().get_operations():
        if operation in makers:
            ready.append(operation)
        elif operation in waits:
            operation._add_control_inputs(ready)
            ready = []


def take_reduced_gradients(
    optimizer: keras.optimizers.Optimizer,
    reduce: Callable[[Gradients, list[str]], list[Any]],
    take: Callable[[Any, Gradients, Any], bool],
) -> None:
    """Makes `optimizer.apply` reduce the gradients once, before anything else.

    Clipping, finite checks and loss scaling inside the optimizer then see the gradient of the
    global batch. Keras itself reduces after them. The optimizer gets a derived class with the same
    name and module, so that it is saved as before.

    Args:
        optimizer: the optimizer to change, with its inner optimizers.
        reduce: returns the gradients of the global batch for those of this replica. It also takes
            the names of the variables, or an empty list if they are not known.
        take: takes optimizer, gradients and variables before the reduction. If it returns True, it
            has kept the gradients, and `apply` updates nothing.
    """
    for inner in inner_optimizers(optimizer):
        _mix_in(inner, _UpdatesReplica)
    _mix_in(optimizer, _ReducesFirst)
    vars(optimizer)["_tfmulti_reduce"] = reduce
    vars(optimizer)["_tfmulti_take"] = take


def inner_optimizers(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Returns the optimizers to which another optimizer passes its gradients."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return list(getattr(optimizer, "optimizers", [])) if inner is None else [inner]


def _mix_in(instance: Any, mixin: type) -> None:
    """Gives an object a class derived from its own and from `mixin`, unless it has one."""
    if not isinstance(instance, mixin):
        own_class = type(instance)
        object.__setattr__(instance, "__class__", derived_class(own_class, (mixin, own_class)))

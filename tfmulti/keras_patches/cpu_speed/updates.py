"""Updates of SGD and Adam in fewer operations than Keras takes for each variable.

The update of SGD is one kernel per variable, where Keras takes up to five operations. The kernel
reads and writes a variable, its gradient and its momentum once. Its numbers differ from those of
Keras' `update_step` in the rounding of the last digit. So it is not used with one replica, which
has Keras' numbers to the bit.
Kernels: https://www.tensorflow.org/api_docs/python/tf/raw_ops/ResourceApplyKerasMomentum and
https://www.tensorflow.org/api_docs/python/tf/raw_ops/ResourceApplyGradientDescent

The update of Adam has the operations of Keras' own. It computes values that are the same for all
variables only once. The step of a large network has a fifth fewer operations, so its first step
comes sooner. TensorFlow's kernel for Adam is not exact enough: it computes 1 - beta from the
rounded beta, which is 1.3e-5 off for 0.999.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfmulti.distribution.replica_slice import PerThread

# The values that the update of all variables computes once, by graph and dtype.
_shared: PerThread[dict[Any, Any]] = PerThread({})


def of_all_variables() -> contextlib.AbstractContextManager[dict[Any, Any]]:
    """Returns a context, for this thread, in which an optimizer updates all its variables once."""
    return _shared.set_to({})


Update = Callable[[Any, Any, list[Any], Any], bool]


def of_step(step: Any) -> Update | None:
    """Returns the update that replaces an optimizer's `update_step`.

    Args:
        step: the bound `update_step` of an optimizer.

    Returns:
        The update for Keras' own SGD or Adam, and None for any other class.
    """
    updates: dict[Any, Update] = {
        keras.optimizers.SGD.update_step: sgd,
        keras.optimizers.Adam.update_step: adam,
    }
    return updates.get(getattr(step, "__func__", None))


def sgd(optimizer: Any, gradient: Any, variables: list[Any], learning_rate: Any) -> bool:
    """Updates a variable by its gradient, as Keras' SGD does, by one kernel.

    Args:
        optimizer: the SGD.
        gradient: the gradient of the global batch.
        variables: the variable and, if the optimizer has a momentum, the momentum's variable.
        learning_rate: one number.

    Returns:
        True if the variable was updated. False means that nothing was done, because the kernel
        does not support the variable, its type or its gradient.
    """
    handles = [_handle(v) for v in variables]
    dtype = tf.as_dtype(keras.backend.standardize_dtype(variables[0].dtype))
    if None in handles or gradient.dtype != dtype or dtype not in (tf.float32, tf.float64):
        return False
    if isinstance(gradient, tf.IndexedSlices):
        # Without a momentum Keras changes only the rows of the slices. A momentum moves all rows.
        if len(handles) == 1:
            return False
        gradient = tf.convert_to_tensor(gradient)
    rate = tf.cast(learning_rate, dtype)
    if len(handles) == 1:
        tf.raw_ops.ResourceApplyGradientDescent(var=handles[0], alpha=rate, delta=gradient)
    else:
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=handles[0],
            accum=handles[1],
            lr=rate,
            grad=gradient,
            momentum=tf.cast(optimizer.momentum, dtype),
            use_nesterov=optimizer.nesterov,
        )
    return True


def adam(optimizer: Any, gradient: Any, variables: list[Any], learning_rate: Any) -> bool:
    """Updates a variable by its gradient, with the numbers of Keras' Adam to the bit.

    Args:
        optimizer: the Adam.
        gradient: the gradient of the global batch.
        variables: the variable, its momentum and its velocity.
        learning_rate: one number.

    Returns:
        True if the variable was updated. False means that nothing was done, because the optimizer
        has `amsgrad` or the gradient is `tf.IndexedSlices`.
    """
    variable, momentum, velocity = variables
    if optimizer.amsgrad or isinstance(gradient, tf.IndexedSlices):
        return False
    ops, dtype = keras.ops, variable.dtype
    key = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph(), dtype
    shared = _shared.get()
    if key not in shared:
        step = ops.cast(optimizer.iterations + 1, dtype)
        by_first = ops.power(ops.cast(optimizer.beta_1, dtype), step)
        by_second = ops.power(ops.cast(optimizer.beta_2, dtype), step)
        shared[key] = ops.cast(learning_rate, dtype) * ops.sqrt(1 - by_second) / (1 - by_first)
    gradient = ops.cast(gradient, dtype)
    optimizer.assign_add(momentum, (gradient - momentum) * (1 - optimizer.beta_1))
    optimizer.assign_add(velocity, (ops.square(gradient) - velocity) * (1 - optimizer.beta_2))
    move = momentum * shared[key] / (ops.sqrt(velocity) + optimizer.epsilon)
    optimizer.assign_sub(variable, move)
    return True


def _handle(variable: Any) -> Any:
    """Returns the resource handle of a variable on this replica, or None if it has none."""
    if tf.distribute.in_cross_replica_context():
        return None
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return getattr(value, "handle", None)

"""SGD's update as one kernel a variable, where Keras takes up to five operations.

A variable, its gradient and its momentum are read and written once; the numbers are those of Keras'
`update_step` but for the rounding of the last digit. So one device, which has Keras' numbers to the
bit, keeps that. Kernels:
https://www.tensorflow.org/api_docs/python/tf/raw_ops/ResourceApplyKerasMomentum and
https://www.tensorflow.org/api_docs/python/tf/raw_ops/ResourceApplyGradientDescent

Not for Adam: TensorFlow's kernel takes 1 - beta of the rounded beta, 1.3e-5 off for 0.999.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


def update(optimizer: Any, gradient: Any, variables: list[Any], learning_rate: Any) -> bool:
    """Updates a variable by its gradient; returns False, with nothing done, where it cannot.

    Args:
        optimizer: one that `knows` says True of.
        variables: the variable and, where the optimizer has a momentum, the one of that.
    """
    handles = [_handle(v) for v in variables]
    dtype = tf.as_dtype(keras.backend.standardize_dtype(variables[0].dtype))
    if None in handles or gradient.dtype != dtype or dtype not in (tf.float32, tf.float64):
        return False
    if isinstance(gradient, tf.IndexedSlices):
        if len(handles) == 1:
            return False  # Keras changes those rows alone; a momentum moves all
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


def knows(step: Any) -> bool:
    """Returns whether an optimizer's method is Keras' SGD's, and not that of a class of its own."""
    return getattr(step, "__func__", None) is keras.optimizers.SGD.update_step


def _handle(variable: Any) -> Any:
    """Returns the resource of a Keras or TensorFlow variable on this replica, if it is one."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return getattr(value, "handle", None)

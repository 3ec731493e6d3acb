"""Patches of functions, so that steps of one device can be traced for replicas.

Inside a replica's step the Python function of a `tf.function` is traced in place. A function that
the user decorates with `@tf.function` would be one operation in the graph of the step. `row_labels`
cannot read such an operation, and TensorFlow cannot build it once more for the global batch. So its
operations go into the graph of the step itself, as those of any other function of the user.

| what | private name | upstream | can go when |
|---|---|---|---|
| shapes in floats | public: `tf.shape` | none | TensorFlow gives a shape in floats if the number of rows is not known while tracing |
| a number for each row, which is added | `backend.tensorflow.numpy.add` | none | Keras takes an addend of the shape `(rows, 1)` for no bias |
| `_named_anew` | `control_flow_util_v2.create_new_tf_function` | none | TensorFlow differentiates two loops that call the same functions |
| functions within a step | `polymorphic_function.Function`, its `_autograph` | none | an operation that calls a function can be built again with other inputs |
"""  # noqa: E501

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow import numpy as keras_numpy
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.ops import control_flow_util_v2

from tfmulti.distribution.replica_slice import ReplicaSlice, current
from tfmulti.keras_patches.patching import in_replica_slice, replace
from tfmulti.keras_patches.tracing import by_autograph

_LIBRARIES = ("tfmulti", "keras", "tensorflow")
_numbers = itertools.count()


def install() -> None:
    """Patches `tf.function`, the functions of gradients of loops, `tf.shape` and Keras' `add`."""
    replace(Function, "__call__", in_replica_slice(_trace_in_place))
    replace(control_flow_util_v2, "create_new_tf_function", in_replica_slice(_named_anew))
    replace(tf, "shape", _in_any_type)
    replace(keras_numpy, "add", _adding_to_rows)


def _in_any_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `tf.shape` that also gives an unknown number of rows in floats.

    TensorFlow gives floats only if the shape is known while tracing, as it may be on one device.
    The number of rows of a replica is not known then.
    """

    def shape(input: Any, out_type: Any = None, name: str | None = None) -> tf.Tensor:
        if out_type in (None, tf.int32, tf.int64):
            return original(input, out_type, name)
        return tf.cast(original(input, name=name), out_type)

    return shape


def _adding_to_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an `add` that adds an addend of the shape `(rows, 1)` to each row in replicas.

    Keras takes it for a bias if there are as many rows as entries on the second or last axis. The
    rows of a replica are others than those of the batch, so the entries are noted. They are also
    noted where one replica does not know the number of rows, and plain Keras may know it.
    """

    def add(x1: Any, x2: Any) -> Any:
        replica_slice = current()
        is_of_tensors = all(isinstance(x, tf.Tensor) and x.shape.rank for x in (x1, x2))
        if replica_slice is None or not is_of_tensors:
            return original(x1, x2)
        (rows, *wide), (others, *narrow) = x1.shape.as_list(), x2.shape.as_list()
        if not narrow or len(narrow) != len(wide) or set(narrow) != {1} or rows != others:
            return original(x1, x2)
        if rows is not None and replica_slice.is_whole:
            return original(x1, x2)
        replica_slice.note_addend({wide[0], wide[-1]} - {1, None})
        # With the rows first, Keras takes no bias.
        return original(x1, x2) if rows is None else original(x2, x1)

    return add


def _named_anew(original: Callable[..., str], replica_slice: ReplicaSlice, graph: Any) -> str:
    """Returns the name of a function that the gradient of a loop or a condition needs.

    It is another one for each function. A loop that is built once more for the global batch calls
    the functions of the first one. TensorFlow changes these functions for a gradient, and gives
    those of both loops the same names.
    """
    graph.name = f"{graph.name}_{next(_numbers)}"
    return original(graph)


def _trace_in_place(
    original: Callable[..., Any],
    replica_slice: ReplicaSlice,
    function: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls a `tf.function`, and traces its Python function into the graph of a replica's step."""
    python_function = function.python_function
    if tf.executing_eagerly() or not _is_users(python_function):
        return original(function, *args, **kwargs)
    if function._autograph:
        python_function = by_autograph(python_function)
    return python_function(*args, **kwargs)


def _is_users(function: Any) -> bool:
    """Whether a function belongs to the user, and not to a library, such as a pass for XLA."""
    return (getattr(function, "__module__", None) or "").partition(".")[0] not in _LIBRARIES

"""Custom gradients: which of them are known to keep the rows of a batch apart.

Nothing tells how the gradient of a `tf.custom_gradient` of the user's own depends on the rows.
Known are those of tfmulti, and those of TensorFlow that only save memory.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfmulti.distribution.replica_slice import PerThread

# Whether this thread runs a function that has a custom gradient.
is_inside = PerThread(False)
# The names of results, by their graphs.
_Names = weakref.WeakKeyDictionary[tf.Graph, set[str]]
_formulas: _Names = weakref.WeakKeyDictionary()
_own: _Names = weakref.WeakKeyDictionary()
# The attributes in which TensorFlow keeps the graphs of conditions and loops.
_CALLED = ("_true_graph", "_false_graph", "_body_graph")


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of tfmulti with the gradient that it returns, as `tf.custom_gradient`."""
    with_gradient = tf.custom_gradient(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        results = with_gradient(*args)
        _note(_own, results)
        return results

    return call


def mark_formula(results: Any) -> None:
    """Says that a custom gradient is that of the operations behind the results."""
    _note(_formulas, results)


def _note(names: _Names, results: Any) -> None:
    if not tf.executing_eagerly():
        for result in tf.nest.flatten(results):
            names.setdefault(result.graph, set()).add(result.name)


def is_formula(output: tf.Tensor) -> bool:
    """Returns whether `mark_formula` got a tensor."""
    return output.name in _formulas.get(output.graph, ())


def has_custom_gradient(op: tf.Operation) -> bool:
    """Returns whether an operation is the result of `tf.custom_gradient`."""
    return op.type == "IdentityN" and "_gradient_op_type" in op.node_def.attr


class Registry:
    """Tells whether TensorFlow has a gradient for an operation.

    Attributes:
        has_gradient: the function that tells it, which `keras_patches.gradients` sets.
    """

    has_gradient: Callable[[tf.Operation], bool] = staticmethod(lambda op: True)


def unknown_in(op: tf.Operation) -> Iterator[str]:
    """Yields the names of custom gradients that are not known: an operation, or those inside it."""
    for inner in filter(has_custom_gradient, operations_in(op)):
        outputs = {output.name for output in inner.outputs}
        if not any(outputs & names.get(inner.graph, set()) for names in (_formulas, _own)):
            yield inner.name


def are_behind(target: tf.Tensor) -> bool:
    """Returns whether a tensor depends on a custom gradient that is not that of the operations."""
    stack, visited = [target], {target.name}
    while stack:
        tensor = stack.pop()
        if any(map(has_custom_gradient, operations_in(tensor.op))) and not is_formula(tensor):
            return True
        for behind in tensor.op.inputs:
            if behind.name not in visited:
                visited.add(behind.name)
                stack.append(behind)
    return False


def operations_in(op: tf.Operation) -> Iterator[tf.Operation]:
    """Yields an operation, and those inside it if it is a condition or a loop."""
    yield op
    for graph in (getattr(op, name, None) for name in _CALLED):
        for inner in () if graph is None else graph.get_operations():
            yield from operations_in(inner)

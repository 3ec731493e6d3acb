"""Access to how TensorFlow traces functions.

| what | private name | upstream | can go when |
|---|---|---|---|
| `by_autograph` | `tf.__internal__.autograph.tf_convert`, `control_status_ctx` | none | TensorFlow has a public way to convert one part of a function |
| `wholly_by_autograph` | `tf.__internal__.autograph.tf_convert`, `ag_ctx.ControlStatusCtx`, `converter.ConversionOptions` | none | as for `by_autograph` |
| `traces_of` | `tf.function`'s `_list_all_concrete_functions` | none | TensorFlow tells them |
| `graphs_called_by` | `tf.Graph`'s `_get_function` | none | TensorFlow gives the graph of a function that an operation calls |
| `eager_mode` | `tf.__internal__.eager_context.eager_mode` | none | TensorFlow has a public way to leave a strategy's scope |
"""  # noqa: E501

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx, converter


def by_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a version of a function that AutoGraph converts when TensorFlow traces it.

    AutoGraph converts the functions that it calls, too.
    """
    autograph = tf.__internal__.autograph
    converted: Callable[..., Any] = autograph.tf_convert(function, autograph.control_status_ctx())
    return converted


def wholly_by_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a version of a function that AutoGraph converts, wherever it is called from.

    `by_autograph` converts nothing in code that AutoGraph was told to leave alone.
    """
    recursive = converter.ConversionOptions(recursive=True)
    status = ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED, options=recursive)
    converted: Callable[..., Any] = tf.__internal__.autograph.tf_convert(function, status)
    return converted


def traces_of(function: Any) -> list[Any]:
    """Returns the concrete functions that a `tf.function` has been traced to so far."""
    return list(function._list_all_concrete_functions())


def graphs_called_by(op: tf.Operation) -> dict[str, Any]:
    """Returns the graphs of the functions that an operation calls, by the names of its attributes.

    Several functions of one attribute, such as the branches of `Case`, have a number at the end.
    """
    called = {}
    for name, value in op.node_def.attr.items():
        functions = [value.func] if value.HasField("func") else value.list.func
        for number, function in enumerate(functions):
            key = name if value.HasField("func") else f"{name}{number}"
            called[key] = op.graph._get_function(function.name).graph
    return called


def eager_mode() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which operations run at once, whatever graph is the default one."""
    mode: contextlib.AbstractContextManager[None] = tf.__internal__.eager_context.eager_mode()
    return mode

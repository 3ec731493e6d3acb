"""Access to how TensorFlow traces functions and optimizes their graphs.

| what | private name | upstream | can go when |
|---|---|---|---|
| `by_autograph` | `tf.__internal__.autograph.tf_convert`, `ag_ctx.ControlStatusCtx`, `converter.ConversionOptions` | none | TensorFlow has a public way to convert one part of a function |
| `traces_of` | `tf.function`'s `_list_all_concrete_functions` | none | TensorFlow tells them |
| `graphs_called_by` | `tf.Graph`'s `_get_function` | none | TensorFlow gives the graph of a function that an operation calls |
| `optimized_once` | `context.context().function_call_options`, `context.FunctionCallOptions` | none | TensorFlow has public options for the two passes |
| `eager_mode` | `tf.__internal__.eager_context.eager_mode` | none | TensorFlow has a public way to leave a strategy's scope |
"""  # noqa: E501

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx, converter
from tensorflow.python.eager import context


def by_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a version of a function that AutoGraph converts, with the functions that it calls.

    It is converted wherever it is called from, also in code that AutoGraph was told to leave alone.
    """
    recursive = converter.ConversionOptions(recursive=True)

    def enabled() -> ag_ctx.ControlStatusCtx:
        return ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED, options=recursive)

    converted = tf.__internal__.autograph.tf_convert(function, enabled())

    def call(*args: Any, **kwargs: Any) -> Any:
        # The function of a `tf.function` that was traced before asks the context once more.
        with enabled():
            return converted(*args, **kwargs)

    return call


def traces_of(function: Any) -> list[Any]:
    """Returns the concrete functions that a `tf.function` has been traced to so far."""
    return list(function._list_all_concrete_functions())


def nodes_of(graph: tf.Graph) -> list[Any]:
    """Returns the nodes of a graph and of the functions that it calls, as `NodeDef`s."""
    definition = graph.as_graph_def(add_shapes=False)
    functions = (function.node_def for function in definition.library.function)
    return [*definition.node, *itertools.chain.from_iterable(functions)]


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


@contextlib.contextmanager
def optimized_once() -> Iterator[None]:
    """A context in which TensorFlow optimizes the graphs of functions in less time, without a GPU.

    TensorFlow optimizes a graph when it is first run. By default it goes twice over the graph, and
    searches for values that exceed the memory of a device, which it takes to be 256 MiB on a CPU.
    For the copies of several replicas this takes long and gains next to nothing
    (docs/measurements.md). With a GPU nothing changes.

    All calls of a function must be inside the context: TensorFlow optimizes the function anew for
    each other configuration.
    """
    runtime = context.context()
    before = runtime.function_call_options
    if not tf.config.list_logical_devices("GPU"):
        config = before.config_proto_serialized
        runtime.function_call_options = _optimizing_once(config, before.executor_type)
    try:
        yield
    finally:
        runtime.function_call_options = before


@functools.lru_cache
def _optimizing_once(config: bytes, executor_type: str | None) -> Any:
    """Returns the options of a call with a `ConfigProto`, changed for `optimized_once`."""
    changed = tf.compat.v1.ConfigProto.FromString(config)
    options = changed.graph_options.rewrite_options
    options.meta_optimizer_iterations = options.ONE
    options.memory_optimization = options.NO_MEM_OPT
    return context.FunctionCallOptions(executor_type, changed)

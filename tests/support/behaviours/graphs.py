"""Reads the compiled graph of an execution, and finds its collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tests.support.behaviours.common import X, Y, here
from tfmulti.distribution import collectives
from tfmulti.training.input.feed import DataArguments, make_feed
from tfmulti.training.loop.stop_votes import Votes


def graph_of(model: keras.Model, steps: int) -> Any:
    """Returns the graph of an execution of `steps` steps, with the functions that it calls."""
    return graph_of_call(lambda source: model.train_function(source, steps, Votes()).rows, steps)


def graph_of_call(call: Callable[[Any], Any], steps: int = 1) -> Any:
    """Returns the graph of a function of a source of batches, with the functions that it calls."""
    with contextlib.closing(make_feed(DataArguments(X, Y, batch_size=24), here.placement)) as feed:
        source = feed.take(0, steps)
        function = tf.function(lambda: call(source), autograph=False)
        return function.get_concrete_function().graph.as_graph_def()


def nodes_of(graph: Any) -> list[Any]:
    """Returns the nodes of a graph and of its functions."""
    return [*graph.node, *(node for each in graph.library.function for node in each.node_def)]


def is_collective(node: Any) -> bool:
    """Whether a node is a collective of TensorFlow, or starts one of tfmulti."""
    name = node.name.rpartition("/")[2]
    return node.op.startswith("Collective") or name.startswith(collectives.SEND)


def collectives_in(graph: Any, *, within_loop: bool = False) -> list[str]:
    """Returns the sorted kinds of all collectives of a graph, or only of its loops."""
    functions = {each.signature.name: each.node_def for each in graph.library.function}

    def kinds(nodes: Any, outside: bool) -> list[str]:
        found = []
        for node in nodes:
            if is_collective(node) and not outside:
                found.append(collectives.SEND if node.op == "PyFunc" else node.op)
            outside_now = outside and node.op not in ("While", "StatelessWhile")
            for attribute in node.attr.values():
                if attribute.func.name in functions:
                    found += kinds(functions[attribute.func.name], outside_now)
        return found

    return sorted(kinds(graph.node, within_loop))

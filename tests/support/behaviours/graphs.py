"""The compiled graph of an execution, and what is in it."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import tensorflow as tf

from tests.support.behaviours.common import X, Y, here
from tfmulti.distribution import collectives
from tfmulti.training.input.feed import GivenData, make_feed
from tfmulti.training.state.trainer_state import VOTES


def graph_of(made: keras.Model, steps: int) -> Any:
    """Returns the graph of an execution of so many steps, with the functions that it calls."""
    with contextlib.closing(make_feed(GivenData(X, Y, batch_size=24), here.place)) as feed:
        feed.begin_pass()
        source = feed.source(steps)
        whole = tf.function(
            lambda: made.train_function(source, steps, [0.0] * len(VOTES)).rows, autograph=False
        )
        return whole.get_concrete_function().graph.as_graph_def()


def is_collective(node: Any) -> bool:
    """Whether a node is TensorFlow's collective, or begins one of our own."""
    name = node.name.rpartition("/")[2]
    return node.op.startswith("Collective") or name.startswith(collectives.SEND)


def collectives_in(graph: Any, *, within_loop: bool = False) -> list[str]:
    """Returns the kinds of a graph's collectives, sorted: of those in loops, or of all."""
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

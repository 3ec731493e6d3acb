"""Steps whose passes XLA compiles: what is in their graph, and what they leave."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras

from tests.support.behaviours.common import behaviour, fit, here, model
from tests.support.behaviours.graphs import collectives_in, graph_of, is_collective
from tests.support.models import CustomStep
from tfmulti import prepare

LAYERS: dict[str, Callable[[], list[keras.layers.Layer]]] = {
    "dense": list,
    "normalized": lambda: [keras.layers.BatchNormalization()],
    "dropped": lambda: [keras.layers.Dropout(0.3, seed=1)],
}


def _by_xla(graph: Any) -> list[Any]:
    """Returns the functions of a graph that XLA compiles whole."""
    return [each for each in graph.library.function if each.attr["_XlaMustCompile"].b]


def _trained(made: keras.Model) -> dict[str, Any]:
    """Returns what a fit warns of and leaves, and what of its step XLA compiles."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        logs = fit(made)
        fit(made, epochs=1, batch_size=20)  # of which the last batch has fewer rows
    graph = graph_of(made, 1)
    inside = [node for each in _by_xla(graph) for node in each.node_def]
    return {
        "warned": [str(each.message) for each in seen if "XLA" in str(each.message)],
        "logs": logs,
        "weights": [weight.tolist() for weight in made.get_weights()],
        "functions": len(_by_xla(graph)),
        "products": sum(node.op == "MatMul" for node in inside),
        "updates": sum("ApplyGradientDescent" in node.op for node in inside),
        "collectives inside": sum(map(is_collective, inside)),
        "collectives": len(collectives_in(graph)),
    }


@behaviour
def passes_by_xla() -> Any:
    """Returns that of each network, without XLA and with it."""
    found = {}
    for name, layers in LAYERS.items():
        found[name] = []
        for asked in (False, True):
            with here.strategy.scope():
                made = layers()
            found[name].append(_trained(model(*made, prepared={"jit_compile": asked})))
    return found


@behaviour
def who_asks_for_xla() -> Any:
    """Returns what is compiled where `compile` asks for it, and nobody; and who wins."""
    return [
        _trained(model(prepared={"jit_compile": prepared}, jit_compile=compiled))["functions"]
        for prepared, compiled in ((None, True), (None, "auto"), (False, True))
    ]


@behaviour
def steps_that_xla_leaves() -> Any:
    """Returns what is warned of a train_step of its own, microbatches and a layer without XLA."""

    class Plain(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.supports_jit = False

        def call(self, x: Any) -> Any:
            return x

    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        own = prepare(CustomStep(), jit_compile=True)
        own.compile("sgd", "sparse_categorical_crossentropy")
    microbatches = model(prepared={"jit_compile": True, "microbatches": 2})
    left = (own, microbatches, model(Plain(), prepared={"jit_compile": True}))
    found = []
    for made in left:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            fit(made, epochs=1)
        found.append([str(each.message) for each in seen if "XLA" in str(each.message)])
    return found

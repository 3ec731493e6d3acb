"""Returns the graphs and the results of steps whose passes XLA compiles."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras

from tests.support.behaviours.common import classifier, fit, here, weights_of
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


def _trained(model: keras.Model) -> dict[str, Any]:
    """Returns the warnings and results of a fit, and counts of what XLA compiles of its step."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        logs = fit(model)
        # The last batch has fewer rows.
        fit(model, epochs=1, batch_size=20)
    graph = graph_of(model, 1)
    inside = [node for each in _by_xla(graph) for node in each.node_def]
    return {
        "warned": [str(each.message) for each in seen if "XLA" in str(each.message)],
        "logs": logs,
        "weights": weights_of(model),
        "functions": len(_by_xla(graph)),
        "products": sum(node.op == "MatMul" for node in inside),
        "updates": sum("ApplyGradientDescent" in node.op for node in inside),
        "collectives inside": sum(map(is_collective, inside)),
        "collectives": len(collectives_in(graph)),
    }


def passes_compiled_by_xla() -> Any:
    """Returns the fit of each network without XLA, and with it."""
    found = {}
    for name, layers in LAYERS.items():
        found[name] = []
        for asked in (False, True):
            with here.strategy.scope():
                model = layers()
            found[name].append(_trained(classifier(*model, prepared={"jit_compile": asked})))
    return found


def jit_compile_options() -> Any:
    """Returns the compiled functions with XLA, without a choice, and with conflicting options."""
    return [
        _trained(classifier(prepared={"jit_compile": prepared}, jit_compile=compiled))["functions"]
        for prepared, compiled in ((None, True), (None, "auto"), (False, True))
    ]


def warnings_of_steps_without_xla() -> Any:
    """Returns the warnings of a custom step, of microbatches, and of a layer without XLA."""

    class Plain(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.supports_jit = False

        def call(self, x: Any) -> Any:
            return x

    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        custom = prepare(CustomStep(), jit_compile=True)
        custom.compile("sgd", "sparse_categorical_crossentropy")
    microbatches = classifier(prepared={"jit_compile": True, "microbatches": 2})
    no_xla = classifier(Plain(), prepared={"jit_compile": True})
    found = []
    for model in (custom, microbatches, no_xla):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            fit(model, epochs=1)
        found.append([str(each.message) for each in seen if "XLA" in str(each.message)])
    return found

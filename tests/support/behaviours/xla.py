"""Returns the graphs and the results of steps whose passes XLA compiles."""

from __future__ import annotations

import contextlib
import io
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from tests.support.behaviours.common import X, Y, classifier, fit, here, weights_of
from tests.support.behaviours.graphs import (
    collectives_in,
    graph_of,
    graph_of_call,
    is_collective,
)
from tests.support.models import CustomStep
from tfmulti import prepare
from tfmulti.training.loop.stop_votes import Votes


class Truncated(keras.layers.Layer):
    """Adds numbers of Python's and Keras' generators, and some that XLA would draw otherwise."""

    def call(self, x: Any) -> Any:
        x += 0.1 * random.random() + 0.01 * keras.random.normal(tf.shape(x))
        return x + 0.01 * keras.random.truncated_normal(tf.shape(x), seed=3)


class DrawsByTensorFlow(keras.layers.Layer):
    """Adds numbers of TensorFlow's own, which are the same on all replicas."""

    def call(self, x: Any) -> Any:
        return x + 0.01 * tf.random.stateless_normal([8], [1, 2])


class Text(keras.layers.Layer):
    """Has an operation that XLA does not know."""

    def call(self, x: Any) -> Any:
        lengths = tf.strings.length(tf.strings.as_string(tf.cast(x[:, 0], tf.int32)))
        return x + 0.0 * tf.cast(lengths, tf.float32)[:, None]


class Collectives(CustomStep):
    """A custom step that also sums and gathers over the replicas."""

    def train_step(self, data: Any) -> dict[str, Any]:
        logs = super().train_step(data)
        context = tf.distribute.get_replica_context()
        rows = context.all_gather(data[0], 0)
        return {**logs, "sum": context.all_reduce("sum", tf.reduce_sum(rows))}


@contextlib.contextmanager
def merged_as_on_gpus() -> Iterator[None]:
    """Lets the strategy leave out `merge_call` in what XLA compiles, as TensorFlow does on GPUs."""
    extended = vars(here.strategy.extended)
    extended["_use_merge_call"] = lambda: (
        not GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
    )
    try:
        yield
    finally:
        del extended["_use_merge_call"]


LAYERS: dict[str, Callable[[], list[keras.layers.Layer]]] = {
    "dense": list,
    "normalized": lambda: [keras.layers.BatchNormalization()],
    "dropped": lambda: [keras.layers.Dropout(0.3, seed=1), keras.layers.GaussianNoise(0.1, seed=2)],
    "truncated": lambda: [Truncated()],
    "by TensorFlow": lambda: [DrawsByTensorFlow()],
}


class Root(keras.metrics.Mean):
    """The root of the mean loss, which is not the mean over the replicas of their roots."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        values = keras.losses.sparse_categorical_crossentropy(y_true, y_pred)
        super().update_state(values, sample_weight)

    def result(self) -> Any:
        return keras.ops.sqrt(super().result())


class BatchLogs(keras.callbacks.Callback):
    """Keeps the logs of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append({name: float(value) for name, value in logs.items()})


def _by_xla(graph: Any) -> list[Any]:
    """Returns the functions of a graph that XLA compiles whole."""
    return [each for each in graph.library.function if each.attr["_XlaMustCompile"].b]


def _trained(model: keras.Model) -> dict[str, Any]:
    """Returns the warnings and results of a fit, and counts of what XLA compiles of its step."""
    batches = BatchLogs()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        logs = fit(model, callbacks=[batches])
        # The last batch has fewer rows.
        fit(model, epochs=1, batch_size=20, callbacks=[batches])
        evaluated = model.evaluate(X, Y, batch_size=20, verbose=0, return_dict=True)
        predicted = model.predict(X, batch_size=20, verbose=0)
    graph = graph_of(model, 1)
    inside = [node for each in _by_xla(graph) for node in each.node_def]
    return {
        "warned": _about_values(seen),
        "logs": logs,
        "batches": batches.seen,
        "evaluated": evaluated,
        "predicted": predicted.tolist(),
        "weights": weights_of(model),
        "functions": len(_by_xla(graph)),
        "products": sum(node.op == "MatMul" for node in inside),
        "updates": sum(
            node.op in ("ResourceApplyGradientDescent", "AssignSubVariableOp") for node in inside
        ),
        "in evaluate and predict": [
            len(
                _by_xla(graph_of_call(lambda source: model.test_function(source, 1, Votes()).rows))
            ),
            len(_by_xla(graph_of_call(lambda source: model.predict_function(source).outputs))),
        ],
        "collectives inside": sum(map(is_collective, inside)),
        "collectives": len(collectives_in(graph)),
    }


def _about_values(seen: Any) -> list[str]:
    """Returns the warnings of XLA, and those of values that are not understood."""
    texts = [str(each.message) for each in seen]
    return [text for text in texts if "XLA" in text or "not known" in text]


def passes_compiled_by_xla() -> Any:
    """Returns the fit of each network without XLA, and with it."""
    found = {}
    for name, layers in LAYERS.items():
        found[name] = []
        for asked in (False, True):
            with here.strategy.scope():
                model = layers()
                metrics = ["accuracy", Root()]
            prepared = {"jit_compile": asked, "verify": False}
            found[name].append(_trained(classifier(*model, prepared=prepared, metrics=metrics)))
    return found


def jit_compile_options() -> Any:
    """Returns the compiled functions with XLA, without a choice, and with conflicting options."""
    return [
        _trained(classifier(prepared={"jit_compile": prepared}, jit_compile=compiled))["functions"]
        for prepared, compiled in ((None, True), (None, "auto"), (False, True))
    ]


DRAWS = {
    "dropout by XLA": (0.5, {"jit_compile": True}),
    "dropout": (0.5, {"jit_compile": False}),
    "dropout, eagerly": (0.5, {"run_eagerly": True}),
    "no dropout by XLA": (0.0, {"jit_compile": True}),
}


def lines_about_draws(case: str) -> Any:
    """Returns what two trainings print about random numbers."""
    rate, options = DRAWS[case]
    with here.strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(rate)])
        model.compile("sgd", "mse", **options)
    prepare(model, verify=False)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for _ in range(2):
            model.fit(X, X, batch_size=24, verbose=2)
    return [line for line in printed.getvalue().splitlines() if line.startswith("random")]


def losses_without_reduction() -> Any:
    """Returns the weights after a fit by rows' losses, without XLA and with it."""
    loss = keras.losses.SparseCategoricalCrossentropy(reduction=None)
    models = [classifier(prepared={"jit_compile": asked}, loss=loss) for asked in (False, True)]
    for model in models:
        fit(model)
    return [weights_of(model) for model in models]


class Positions(keras.layers.Layer):
    """Adds a table of positions, which all rows look up, to one of tokens, and looks up both."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = keras.layers.Embedding(9, 4, embeddings_initializer="ones")
        self.positions = keras.layers.Embedding(8, 4, embeddings_initializer="ones")

    def call(self, x: Any) -> Any:
        tokens = keras.ops.cast(keras.ops.abs(x) * 3, "int32") % 9
        both = self.tokens(tokens) + self.positions(keras.ops.arange(8))
        # The gradient of the tokens' table then has lookups of both kinds.
        return keras.layers.Flatten()(both * self.tokens(keras.ops.arange(8)))


def lookups_of_positions() -> Any:
    """Returns the weights after a fit by Adam, without XLA and with it."""
    found = []
    for asked in (False, True):
        with here.strategy.scope():
            layer = Positions()
        model = classifier(
            layer, prepared={"jit_compile": asked, "verify": False}, optimizer="adam"
        )
        fit(model)
        found.append(weights_of(model))
    return found


def step_that_xla_cannot_compile() -> None:
    """Fits a model with an operation that XLA does not know."""
    fit(_with_text())


def batch_that_xla_cannot_compile() -> None:
    """Trains one batch of a model with an operation that XLA does not know."""
    _with_text().train_on_batch(X[:8], Y[:8])


def _with_text() -> keras.Model:
    """Returns a model with an operation that XLA does not know, which XLA is to compile."""
    with here.strategy.scope():
        layer = Text()
    return classifier(layer, prepared={"jit_compile": True, "verify": False})


def custom_step_compiled() -> Any:
    """Returns the logs, the weights and the warnings of a custom step.

    The step runs without XLA, with it, and with it as on a GPU.
    """
    found = []
    for asked, merged in (
        (False, contextlib.nullcontext()),
        (True, contextlib.nullcontext()),
        (True, merged_as_on_gpus()),
    ):
        keras.utils.set_random_seed(1)
        with here.strategy.scope():
            model = prepare(Collectives(), jit_compile=asked, verify=False)
            model.compile("adam")
        with warnings.catch_warnings(record=True) as seen, merged:
            warnings.simplefilter("always")
            logs = fit(model)
        functions = len(_by_xla(graph_of(model, 1)))
        found.append([logs, weights_of(model), functions, _about_values(seen)])
    return found


def predictions_of_an_unbuilt_model() -> Any:
    """Returns predictions of models that `predict` builds, without XLA and with it."""
    found = []
    for initializer in ("glorot_uniform", "he_normal"):
        outputs = []
        for asked in (False, True):
            keras.utils.set_random_seed(1)
            with here.strategy.scope():
                layers = [keras.layers.Dense(4, kernel_initializer=initializer) for _ in range(2)]
                model = prepare(keras.Sequential(layers), jit_compile=asked)
            outputs.append(model.predict(X[:1], verbose=0).tolist())
        found.append(outputs)
    return found


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

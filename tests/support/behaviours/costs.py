"""Counts the costs of a step: collectives, calls of TensorFlow, traces, threads."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from tests.support.behaviours.common import X, Y, classifier, fit, here, weights_of
from tests.support.behaviours.graphs import (
    collectives_in,
    graph_of,
    is_collective,
    nodes_of,
)
from tests.support.threads import left_since
from tfmulti import prepare
from tfmulti.distribution import collectives, connections, replica_threads
from tfmulti.distribution.transport import channel, rendezvous
from tfmulti.keras_patches import optimizers
from tfmulti.training.input.prefetcher import Prefetcher
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step.steps_per_execution import StepsPerExecution

ROUND_TRIPS = {
    # The first is a call of a function, the second of a single operation.
    "TFE_Py_Execute": "calls",
    "TFE_Py_FastPathExecute": "calls",
    # float(), int(), np.asarray() and numpy() of a tensor call this.
    "_numpy_internal": "reads",
}

LAYERS: dict[str, Callable[[], list[keras.layers.Layer]]] = {
    "dense": list,
    "normalized": lambda: [keras.layers.BatchNormalization(), keras.layers.BatchNormalization()],
    "large": lambda: [keras.layers.Dense(700), keras.layers.Dense(800), keras.layers.Dense(8)],
}


def collectives_of_a_step() -> Any:
    """Returns the kinds of the collectives in a step of each network."""
    found = {}
    for name, layers in LAYERS.items():
        model = classifier(*layers())
        fit(model, epochs=1)
        found[name] = collectives_in(graph_of(model, 1))
    return found


def operations_before_each_wait() -> Any:
    """Returns, for each wait for other workers, the types of the operations that precede it."""
    layers: list[keras.layers.Layer] = [keras.layers.BatchNormalization()]
    layers += [keras.layers.Dense(5, kernel_regularizer="l2"), keras.layers.BatchNormalization()]
    model = classifier(*layers)
    fit(model, epochs=1)
    graph = graph_of(model, 1)
    found = []
    for nodes in [graph.node, *(each.node_def for each in graph.library.function)]:
        types = {node.name: node.op for node in nodes}
        for node in nodes:
            if node.name.rpartition("/")[2].startswith(collectives.RECEIVE):
                before = (name[1:] for name in node.input if name.startswith("^"))
                found.append(sorted(types[name] for name in before if types[name] != "PyFunc"))
    return found


def operations_before_the_collectives_of_an_execution() -> Any:
    """Returns what orders the collectives of a step and those of the execution around it.

    Returns:
        The types of the operations whose values the first collective of the execution waits for,
        and the types of the operations that wait until the last collective of the step has begun.
    """
    model = classifier()
    fit(model, epochs=1)
    graph = graph_of(model, 1)
    found: tuple[list[str], list[str]] = [], []
    for nodes in [graph.node, *(each.node_def for each in graph.library.function)]:
        by_name = {node.name: node for node in nodes}
        sends = [node for node in nodes if is_collective(node)]
        if sends and any(node.op == "StatefulPartitionedCall" for node in nodes):
            before = [by_name[name[1:]] for name in sends[0].input if name.startswith("^")]
            data = [name.partition(":")[0] for node in before for name in node.input]
            found[0].extend(by_name[name].op for name in data if name in by_name)
        elif sends:
            waiting = [node for node in nodes if f"^{sends[-1].name}" in node.input]
            found[1].extend(node.op for node in waiting)
    return found


class Counted(keras.metrics.SparseCategoricalAccuracy):
    """Counts the calls of `result` of all such metrics."""

    calls = 0

    def result(self) -> Any:
        Counted.calls += 1
        return super().result()


def work_of_a_trace() -> Any:
    """Returns what building a model and tracing its step takes, for few metrics and for more.

    It is the number of calls of `result` for each metric, and how often the captures of a graph are
    listed. Listing them takes longer for a step with more variables.
    """
    captures, found = FuncGraph.captures, []
    for metrics in (2, 12):
        made = [Counted(name=f"m{number}") for number in range(metrics)]
        model = classifier(metrics=made, prepared={"verify": False})
        graphs: list[Any] = []

        def listed(graph: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return captures.fget(graph)

        Counted.calls = 0
        with mock.patch.object(FuncGraph, "captures", property(listed)):
            fit(model, epochs=1)
        found.append((Counted.calls / metrics, len(graphs)))
    return found


class MixedRows(keras.Model):
    """Gives a metric of Keras rows that are scaled by the largest one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.area = keras.metrics.AUC(num_thresholds=20)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.area]

    def train_step(self, data: Any) -> Any:
        x, y = data
        outputs = self(x)[:, 0]
        self.area.update_state(y, outputs / tf.reduce_max(outputs))
        return {"area": self.area.result()}

    test_step = train_step


def _of_mixed_rows(**options: Any) -> keras.Model:
    inputs = keras.Input((6,))
    with here.strategy.scope():
        outputs = keras.layers.Dense(1, "sigmoid")(inputs)
        model = prepare(MixedRows(inputs, outputs), **options)
        model.compile("sgd")
    return model


def evaluation_of_mixed_rows() -> Any:
    """Returns the steps in which each replica computed the whole batch."""
    model = _of_mixed_rows()
    model.evaluate(X, Y, batch_size=24, verbose=0)
    return sorted(state_of(model).traced.whole_batch)


def operations_built_again() -> Any:
    """Returns the kinds of the operations that a step computes anew, with the global batch."""
    model = _of_mixed_rows(verify=False)
    fit(model, epochs=1)
    nodes = nodes_of(graph_of(model, 1))
    return Counter(node.op for node in nodes if "_of_global_batch" in node.name)


def replicas_with_and_without_collectives() -> Any:
    """Returns the collectives and the weights of each network, with plain sums on CPUs.

    The second result is the same with TensorFlow's collectives, which replicas on GPUs use.
    """

    def trained(name: str) -> Any:
        model = classifier(*LAYERS[name]())
        fit(model)
        return collectives_in(graph_of(model, 1)), [
            weight.tolist() for weight in model.get_weights()
        ]

    plain = {name: trained(name) for name in LAYERS}
    with mock.patch.object(replica_threads, "are_siblings", return_value=False):
        return plain, {name: trained(name) for name in LAYERS}


def update_kernels_of_a_step() -> Any:
    """Returns the number of variables that a step of SGD updates by TensorFlow's own kernel."""
    model = classifier()
    fit(model, epochs=1)
    nodes = nodes_of(graph_of(model, 1))
    return sum(node.op == "ResourceApplyGradientDescent" for node in nodes)


OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "Adam with averages": lambda: keras.optimizers.Adam(
        0.01, clipnorm=0.1, use_ema=True, ema_overwrite_frequency=3
    ),
    "Adam with accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3),
    "Adam with amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.CosineDecay(0.01, 20), global_clipnorm=0.1
    ),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adadelta": lambda: keras.optimizers.Adadelta(0.1),
    "Adamax": lambda: keras.optimizers.Adamax(0.01),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "Lion": lambda: keras.optimizers.Lion(0.01),
    "Lamb": lambda: keras.optimizers.Lamb(0.01),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "Muon": lambda: keras.optimizers.Muon(0.01),
}


def updates_of_copies(name: str) -> Any:
    """Trains with an optimizer: by one update of all copies, and by an update on each replica.

    The model has an embedding, whose gradient is sparse, and a constraint.

    Returns:
        For both, the copies of each variable of the model and of the optimizer, and the number of
        operations of a step.
    """

    def trained() -> Any:
        keras.utils.set_random_seed(1)
        embedding = keras.layers.Embedding(9, 4)
        layers = [keras.layers.Lambda(lambda x: x[:, :2] > 0), embedding, keras.layers.Flatten()]
        constrained = keras.layers.Dense(8, "relu", kernel_constraint="max_norm")
        model = classifier(*layers, constrained, optimizer=OPTIMIZERS[name]())
        fit(model, epochs=1)
        variables = [*model.variables, *model.optimizer.variables]
        copies = [[copy.numpy().tolist() for copy in v.value.values] for v in variables]
        return copies, len(nodes_of(graph_of(model, 1)))

    at_once = trained()
    with mock.patch.object(optimizers, "_can_update_copies", return_value=False):
        return at_once, trained()


def tensorflow_calls_of_a_step() -> Any:
    """Returns the calls and the reads that 20 more steps take, and the number of traces."""
    model = classifier()
    x, y = np.tile(X, (10, 1)), np.tile(Y, 10)

    def executed(steps: int) -> Counter[str]:
        """Counts the calls and the reads of a fit."""
        count: Counter[str] = Counter()

        def note(frame: Any, event: str, argument: Any) -> None:
            if event == "c_call" and argument.__name__ in ROUND_TRIPS:
                count[ROUND_TRIPS[argument.__name__]] += 1

        def close_uncounted(prefetcher: Prefetcher) -> None:
            # The number of batches that are left in the queue differs from run to run.
            sys.setprofile(None)
            close(prefetcher)
            sys.setprofile(note)

        close = Prefetcher.close
        sys.setprofile(note)
        try:
            with mock.patch.object(Prefetcher, "close", close_uncounted):
                fit(model, x=x, y=y, epochs=1, steps_per_epoch=steps)
        finally:
            sys.setprofile(None)
        return count

    executed(10)
    few, many = executed(10), executed(30)
    # The last batch has fewer rows.
    uneven = classifier()
    fit(uneven, x=x[:61], y=y[:61], epochs=3)
    calls, reads = (many[kind] - few[kind] for kind in ("calls", "reads"))
    return [calls, reads, uneven.train_function.one.experimental_get_tracing_count()]


class CustomStep(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


class StepInAFunction(CustomStep):
    @tf.function  # type: ignore[untyped-decorator]
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def functions_converted_by_autograph() -> Any:
    """Returns what AutoGraph converts for Keras' step, a custom one, and one in a tf.function."""
    with here.strategy.scope():
        layers = [keras.Input((6,)), keras.layers.Dense(3, "softmax")]
        models = [classifier(), prepare(CustomStep(layers)), prepare(StepInAFunction(layers))]
        for model in models[1:]:
            model.compile("sgd", "sparse_categorical_crossentropy")
    found = []
    for model in models:
        seen: set[str] = set()

        def note(frame: Any, event: str, argument: Any, seen: set[str] = seen) -> None:
            code = frame.f_code
            if "__autograph_generated_file" in code.co_filename and code.co_name[:4] == "tf__":
                seen.add(code.co_name)

        # Each replica is traced in a thread.
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            fit(model, validation_split=0.25)
            model.predict(X, verbose=0)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        found.append(sorted(seen))
    return found


class CountsTraces(keras.Model):
    """Has a custom step that counts its traces, and leaves the optimizer of `compile` unused."""

    def __init__(self, built: bool) -> None:
        super().__init__()
        inputs = [keras.Input((6,))] if built else []
        self.inner = keras.Sequential([*inputs, keras.layers.Dense(3, "softmax")])
        self.own = keras.optimizers.SGD(0.1)
        # A number would be the same on each replica.
        self.traces: list[str] = []

    def train_step(self, data: Any) -> Any:
        self.traces.append("trace")
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, self.inner(x)))
        weights = self.trainable_weights
        self.own.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def traces_of_a_custom_step(layers: str) -> Any:
    """Returns the numbers of traces in a first and in a second `fit` of layers "built" or not."""
    with here.strategy.scope():
        model = prepare(CountsTraces(layers == "built"), verify=False)
        model.compile()
    fit(model, epochs=1)
    first = len(model.traces)
    fit(model, epochs=1)
    return [first, len(model.traces) - first]


def inter_op_threads() -> Any:
    """Returns the number of threads that run operations in parallel. 0 is the default."""
    return tf.config.threading.get_inter_op_parallelism_threads()


def threads_left_by_fit() -> Any:
    """Returns the names of the threads that a `fit` leaves."""
    model = classifier()
    before = set(threading.enumerate())
    fit(model, validation_split=0.25)
    return left_since(before)


def _of_all_rows(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """A loss whose value for a row depends on all rows."""
    return tf.reduce_mean(tf.matmul(y_pred, y_pred, transpose_b=True), -1)


def automatic_steps_per_execution() -> Any:
    """Returns the steps after which callbacks were called, and the weights, of three runs.

    The runs have one step per execution, an automatic number, and an automatic number with a
    loss that gathers rows. Each worker measures another number as the best one.
    """
    seen: list[int] = []

    class Sees(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(batch)

    x, y = np.tile(X, (10, 1)), np.tile(Y, 10)
    found = []
    with mock.patch.object(StepsPerExecution, "_best", return_value=7 - here.placement.rank):
        for chosen, options in ((None, {}), ("auto", {}), ("auto", {"loss": _of_all_rows})):
            model = classifier(prepared={"seed": 1, "steps_per_execution": chosen}, **options)
            seen.clear()
            fit(model, x=x, y=y, epochs=1, callbacks=[Sees()])
            found.append([list(seen), weights_of(model)])
    return found


def training_without_connections() -> Any:
    """Returns the kinds of the collectives and the weights, with connections between workers.

    The second result is the same if no worker can connect to the last worker.
    """
    layers = LAYERS["normalized"]

    def trained() -> Any:
        model = classifier(*layers())
        fit(model)
        return sorted(set(collectives_in(graph_of(model, 1)))), weights_of(model)

    def fails(*args: Any) -> Any:
        if here.placement.rank == here.placement.workers - 1:
            args[0].close()
            raise channel.ChannelError("no route to host")
        return rendezvous.connect_workers(*args, timeout_s=1.0)

    with_connections = trained()
    with (
        mock.patch.dict(connections._connected, clear=True),
        mock.patch.object(connections, "connect_workers", fails),
    ):
        return [with_connections, trained()]

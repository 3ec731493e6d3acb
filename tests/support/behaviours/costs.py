"""What a step costs, in counts: collectives, calls into TensorFlow, traces, threads."""

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

from tests.support.behaviours.common import X, Y, behaviour, behaviour_at, fit, here, model
from tests.support.behaviours.graphs import collectives_in, graph_of
from tests.support.threads import left_since
from tfmulti import prepare
from tfmulti.distribution import collectives, connections, replica_threads
from tfmulti.distribution.transport import channel, rendezvous
from tfmulti.training.input.prefetcher import Prefetcher
from tfmulti.training.step import steps_per_execution

ROUND_TRIPS = {
    "TFE_Py_Execute": "calls",  # of functions
    "TFE_Py_FastPathExecute": "calls",  # of operations by themselves
    "_numpy_internal": "reads",  # float(), int(), np.asarray() and numpy() of a tensor
}

LAYERS: dict[str, Callable[[], list[keras.layers.Layer]]] = {
    "dense": list,
    "normalized": lambda: [keras.layers.BatchNormalization(), keras.layers.BatchNormalization()],
    "large": lambda: [keras.layers.Dense(700), keras.layers.Dense(800), keras.layers.Dense(8)],
}


@behaviour
def collectives_of_a_step() -> Any:
    """Returns the kinds of the collectives of a step, of each network."""
    found = {}
    for name, layers in LAYERS.items():
        made = model(*layers())
        fit(made, epochs=1)
        found[name] = collectives_in(graph_of(made, 1))
    return found


@behaviour_at("multi_worker_mirrored")
def computed_before_waits() -> Any:
    """Returns the types of what waits for others come after, of which others' part is no input."""
    layers: list[keras.layers.Layer] = [keras.layers.BatchNormalization()]
    layers += [keras.layers.Dense(5, kernel_regularizer="l2"), keras.layers.BatchNormalization()]
    made = model(*layers)
    fit(made, epochs=1)
    graph = graph_of(made, 1)
    found = []
    for nodes in [graph.node, *(each.node_def for each in graph.library.function)]:
        types = {node.name: node.op for node in nodes}
        for node in nodes:
            if node.name.rpartition("/")[2].startswith(collectives.RECEIVE):
                before = (name[1:] for name in node.input if name.startswith("^"))
                found.append(sorted(types[name] for name in before if types[name] != "PyFunc"))
    return found


@behaviour_at("mirrored")
def by_tensorflows_collectives() -> Any:
    """Returns weights by plain sums and by collectives, as on GPUs, and of these the kinds."""

    def trained(name: str) -> Any:
        made = model(*LAYERS[name]())
        fit(made)
        return collectives_in(graph_of(made, 1)), [weight.tolist() for weight in made.get_weights()]

    plain = {name: trained(name) for name in LAYERS}
    ours = replica_threads._are_siblings
    replica_threads._are_siblings = lambda *_: False  # type: ignore[assignment]
    try:
        return plain, {name: trained(name) for name in LAYERS}
    finally:
        replica_threads._are_siblings = ours  # type: ignore[assignment]


@behaviour
def kernels_that_update() -> Any:
    """Returns how many variables a step of SGD updates by a kernel of its own."""
    made = model()
    fit(made, epochs=1)
    graph = graph_of(made, 1)
    nodes = [*graph.node, *(n for each in graph.library.function for n in each.node_def)]
    return sum(node.op == "ResourceApplyGradientDescent" for node in nodes)


@behaviour
def calls_of_a_step() -> Any:
    """Returns the calls into TensorFlow of 20 more steps, what is read, and the step's traces."""
    made = model()
    x, y = np.tile(X, (10, 1)), np.tile(Y, 10)

    def executed(steps: int) -> Counter[str]:
        """Returns how often functions and single operations ran, and tensors were read."""
        count: Counter[str] = Counter()

        def note(frame: Any, event: str, argument: Any) -> None:
            if event == "c_call" and argument.__name__ in ROUND_TRIPS:
                count[ROUND_TRIPS[argument.__name__]] += 1

        def closed(stream: Prefetcher) -> None:
            sys.setprofile(None)  # it empties the queue, which has more in it or less
            close(stream)
            sys.setprofile(note)

        close = Prefetcher.close
        sys.setprofile(note)
        try:
            with mock.patch.object(Prefetcher, "close", closed):
                fit(made, x=x, y=y, epochs=1, steps_per_epoch=steps)
        finally:
            sys.setprofile(None)
        return count

    executed(10)
    few, many = executed(10), executed(30)
    uneven = model()
    fit(uneven, x=x[:61], y=y[:61], epochs=3)  # the last batch has fewer rows
    calls, reads = (many[kind] - few[kind] for kind in ("calls", "reads"))
    return [calls, reads, uneven.train_function.one.experimental_get_tracing_count()]


class OwnStep(keras.Sequential):
    """A step of the user's own."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


@behaviour
def read_by_autograph() -> Any:
    """Returns the functions that AutoGraph wrote anew: of Keras' step, and of a user's own."""
    with here.strategy.scope():
        own = prepare(OwnStep([keras.Input((6,)), keras.layers.Dense(3, "softmax")]))
        own.compile("sgd", "sparse_categorical_crossentropy")
    found = []
    for made in (model(), own):
        seen: set[str] = set()

        def note(frame: Any, event: str, argument: Any, seen: set[str] = seen) -> None:
            code = frame.f_code
            if "__autograph_generated_file" in code.co_filename and code.co_name[:4] == "tf__":
                seen.add(code.co_name)

        sys.setprofile(note)
        threading.setprofile(note)  # each replica is traced in a thread
        try:
            fit(made, validation_split=0.25)
            made.predict(X, verbose=0)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        found.append(sorted(seen))
    return found


class TwoOptimizers(keras.Model):
    """A step that counts its traces and never uses the optimizer that `compile` makes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "softmax")])
        self.own, self.traces = keras.optimizers.SGD(0.1), 0

    def train_step(self, data: Any) -> Any:
        self.traces += 1
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, self.inner(x)))
        weights = self.trainable_weights
        self.own.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@behaviour
def traces_of_an_own_step() -> Any:
    """Returns how often the step was traced in a first and in a second `fit`."""
    with here.strategy.scope():
        made = prepare(TwoOptimizers(), verify=False)
        made.compile()
    fit(made, epochs=1)
    first, made.traces = made.traces, 0
    fit(made, epochs=1)
    return [first, made.traces]


@behaviour
def threads_that_compute() -> Any:
    """Returns how many threads TensorFlow was given for operations; for each, tests say it."""
    return tf.config.threading.get_inter_op_parallelism_threads()


@behaviour
def threads_after_fit() -> Any:
    """Returns the names of the threads that `fit` has left."""
    made = model()
    before = set(threading.enumerate())
    fit(made, validation_split=0.25)
    return left_since(before)


def _of_all_rows(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """A value for each row, which depends on all others."""
    return tf.reduce_mean(tf.matmul(y_pred, y_pred, transpose_b=True), -1)


@behaviour
def the_chiefs_pace() -> Any:
    """Returns the steps at which callbacks were called, where each worker wants its own pace.

    Each time with the weights: one step a call, as many as were chosen, and where steps gather.
    """
    best, steps_per_execution.StepsPerExecution._best = (
        steps_per_execution.StepsPerExecution._best,
        lambda self, left: 7 - here.place.rank,
    )  # type: ignore[method-assign]
    seen: list[int] = []

    class Sees(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(batch)

    x, y = np.tile(X, (10, 1)), np.tile(Y, 10)
    found = []
    try:
        for chosen, options in ((None, {}), ("auto", {}), ("auto", {"loss": _of_all_rows})):
            made = model(prepared={"seed": 1, "steps_per_execution": chosen}, **options)
            seen.clear()
            fit(made, x=x, y=y, epochs=1, callbacks=[Sees()])
            found.append([list(seen), [weight.tolist() for weight in made.get_weights()]])
    finally:
        steps_per_execution.StepsPerExecution._best = best  # type: ignore[method-assign]
    return found


@behaviour_at("multi_worker_mirrored")
def without_connections() -> Any:
    """Returns weights with connections between workers, and where the last cannot be reached.

    With the collectives that each takes.
    """
    layers = LAYERS["normalized"]

    def trained() -> Any:
        made = model(*layers())
        fit(made)
        kinds = sorted(set(collectives_in(graph_of(made, 1))))
        return kinds, [weight.tolist() for weight in made.get_weights()]

    def fails(*args: Any) -> Any:
        if here.place.rank == here.place.workers - 1:
            args[0].close()
            raise channel.ChannelError("no route to host")
        return rendezvous.connect_workers(*args, timeout_s=1.0)

    found = [trained()]
    known = dict(connections._connected)
    connections._connected.clear()
    connections.connect_workers = fails
    try:
        found.append(trained())
    finally:
        connections.connect_workers = rendezvous.connect_workers
        connections._connected.update(known)
    return found

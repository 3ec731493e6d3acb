"""Trains models made outside the scope, and compares the first steps with one device."""

from __future__ import annotations

import contextlib
import logging
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tests.support.behaviours.common import X, Y, fit, here
from tfmulti import prepare, verify
from tfmulti.distribution import global_builder, global_values, replica_context
from tfmulti.distribution.lookup_gradients import Lookup
from tfmulti.errors import ModelError, VerificationError
from tfmulti.keras_patches import layers, losses
from tfmulti.keras_patches.tracing import traces_of
from tfmulti.training.state import relocation
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step.step_logs import StepLogs
from tfmulti.training.verification import comparison, step_comparison
from tfmulti.training.verification.comparison import Difference
from tfmulti.training.verification.plain_run import PlainRun

ONE_STEP = {"epochs": 1, "x": X[:18], "y": Y[:18], "batch_size": 15, "shuffle": False}


def _network(normalizes: bool = False) -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, "relu")(inputs)
    if normalizes:
        hidden = keras.layers.BatchNormalization()(hidden)
    hidden = keras.layers.Dropout(0.25, seed=3)(hidden)
    return keras.Model(inputs, keras.layers.Dense(3, "softmax")(hidden))


def _compile(model: keras.Model) -> None:
    optimizer = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])


def _numbers(model: keras.Model, **options: Any) -> list[Any]:
    """Trains a model. Returns the history, weights, slots and predictions."""
    history = fit(model, x=X[:50], y=Y[:50], batch_size=15, shuffle=False, **options)
    variables = [*model.weights, *model.optimizer.variables]
    return [
        list(history.values()),
        [np.asarray(v).tolist() for v in variables],
        model.predict(X[:7], verbose=0).tolist(),
    ]


def built_and_compiled_outside_the_scope() -> Any:
    model = _network(normalizes=True)
    _compile(model)
    return _numbers(prepare(model))


def prepared_then_compiled_outside_the_scope() -> Any:
    model = prepare(_network())
    _compile(model)
    return _numbers(model)


def trained_then_prepared_outside_the_scope() -> Any:
    """`prepare` keeps weights, slots, averages and metrics of an epoch of plain Keras."""
    model = _network()
    _compile(model)
    fit(model, x=X[:40], y=Y[:40], batch_size=20, shuffle=False, epochs=1)
    before = [np.asarray(v) for v in [*model.variables, *model.optimizer.variables]]
    prepare(model)
    after = [np.asarray(v) for v in [*model.variables, *model.optimizer.variables]]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    return _numbers(model)


def compiled_outside_the_scope() -> Any:
    with here.strategy.scope():
        model = prepare(_network())
    _compile(model)
    return _numbers(model)


# Variables that a function of this module changes, which a step calls.
counted: dict[str, Any] = {}


def _count_in(names: list[str]) -> None:
    for variable in [counted[name] for name in names]:
        variable.assign_add(1.0)


def custom_variables_outside_the_scope() -> Any:
    """A step changes `tf.Variable`s of a closure, a list, dicts of tuples, and a global dict."""
    count = tf.Variable(0.0)
    counted["steps"] = tf.Variable(0.0)

    class Counts(keras.Model):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.doubled = [tf.Variable(1.0)]
            self.pair = {"both": (tf.Variable(1.0), tf.Variable(2.0))}

        def train_step(self, data: Any) -> Any:
            count.assign_add(1.0)
            _count_in(["steps"])
            self.doubled[0].assign(self.doubled[0] * 2.0)
            self.pair["both"][1].assign_add(self.pair["both"][0])
            self.pair["both"][0].assign_add(1.0)
            return super().train_step(data)

    plain = _network()
    model = Counts(inputs=plain.inputs, outputs=plain.outputs)
    _compile(model)
    numbers = _numbers(prepare(model), epochs=1)
    step = Counts.train_step
    assert step.__closure__ is not None
    cells = dict(zip(step.__code__.co_freevars, step.__closure__, strict=True))
    variables = [cells["count"].cell_contents, model.doubled[0], *model.pair["both"]]
    variables.append(counted["steps"])
    return [numbers, [float(np.asarray(v)) for v in variables]]


def trained_inside_the_scope() -> Any:
    """All of a program is inside the scope, `fit` with two optimizers too."""
    with here.strategy.scope():
        model = _own()
        history = fit(model, x=X[:50], y=Y[:50], batch_size=15, shuffle=False)
        return [list(history.values()), [np.asarray(v).tolist() for v in model.weights]]


def built_in_the_scope_of_another_strategy() -> Any:
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        model = _network()
    with here.strategy.scope():
        _compile(model)
    assert model.distribute_strategy is not here.strategy
    prepare(model)


class Own(keras.Model):
    """A user's model with two optimizers, a metric and dropout. `wrong` names a mistake in it."""

    def __init__(self, wrong: str | None = None) -> None:
        super().__init__()
        self.wrong = wrong
        self.hidden = keras.layers.Dense(8, "tanh")
        self.normalization = keras.layers.BatchNormalization()
        self.dropout = keras.layers.Dropout(0.25, seed=3)
        self.mixing = _Mixing(wrong == "rows are mixed")
        self.last = keras.layers.Dense(3)
        self.second = keras.optimizers.SGD(0.1, momentum=0.9)
        self.total = keras.metrics.Mean(name="total")
        self.largest = _Largest(sums=wrong != "metric")
        self.queue = tf.Variable(tf.zeros([4, 3]), trainable=False)

    @property
    def metrics(self) -> list[Any]:
        return [self.total, self.largest]

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = self.normalization(self.hidden(x), training=training)
        hidden = self.dropout(hidden, training=training)
        return self.last(self.mixing(hidden))

    def train_step(self, data: Any) -> Any:
        x, y = data
        if self.wrong == "random numbers":
            x = x + tf.random.normal(tf.shape(x))
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
            loss = tf.reduce_mean(losses)
            if self.wrong == "loss":
                # The public property is 1 in a step.
                loss = loss / tf.distribute.get_strategy().extended._num_replicas_in_sync
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply(gradients[:2], weights[:2])
        self.second.apply(gradients[2:], weights[2:])
        if self.wrong == "weights":
            weights[0].assign_sub(0.1 * gradients[0])
        if self.wrong == "queue":
            self.queue.assign(tf.concat([outputs, self.queue], 0)[:4])
        self.total.update_state(losses)
        self.largest.update_state(y, outputs)
        return {metric.name: metric.result() for metric in self.metrics}


class _Mixing(keras.layers.Layer):
    def __init__(self, mixes: bool) -> None:
        super().__init__(name="mixing")
        self.mixes = mixes

    def call(self, x: Any) -> Any:
        return x + tf.tensordot(x, x, [[0], [0]])[0] if self.mixes else x


class _Largest(keras.metrics.Metric):
    """Sums the largest outputs of the rows, or wrongly keeps the largest of all."""

    def __init__(self, sums: bool) -> None:
        super().__init__(name="largest")
        self.sums = sums
        self.found = self.add_weight(name="found", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        rows = tf.reduce_max(y_pred, -1)
        if self.sums:
            self.found.assign_add(tf.reduce_sum(rows))
        else:
            self.found.assign(tf.maximum(tf.convert_to_tensor(self.found), tf.reduce_max(rows)))

    def result(self) -> Any:
        return self.found


def _own(wrong: str | None = None, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        model = Own(wrong)
        model.compile(keras.optimizers.Adam(0.01))
    return prepare(model, **options)


def _state(model: keras.Model) -> list[np.ndarray]:
    variables = [*model.variables, *model.optimizer.variables, *model.second.variables]
    values = [*(v.value for v in variables), model.queue]
    of_each = here.strategy.experimental_local_results
    return [np.asarray(part) for value in values for part in of_each(value)]


def training_with_and_without_verification() -> Any:
    """Returns the verdicts of `fit` and `verify`, and whether they change nothing else."""
    runs = []
    for asked in (True, False):
        model = _own(verify=asked, verify_steps=2)
        history = fit(model, **ONE_STEP)
        runs.append([history, _state(model), random.random(), np.random.rand()])
        if asked:
            found = state_of(model).verification
    same = [
        runs[0][0] == runs[1][0],
        all(np.array_equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True)),
        runs[0][2:] == runs[1][2:],
    ]
    before = _state(model)
    again = verify(model, X[:30], Y[:30], batch_size=15)
    same.append(all(np.array_equal(a, b) for a, b in zip(before, _state(model), strict=True)))
    return [found.verdict, found.steps, found.quantities > 20, again.verdict, same]


def fit_with_a_mistake(case: str) -> None:
    """Fits a wrong model, without the global values that would correct most of the mistakes."""
    model = _own(case)
    with mock.patch.object(global_values, "are_known", return_value=False):
        fit(model, **ONE_STEP)


def _compiled(model: keras.Model, **options: Any) -> keras.Model:
    with here.strategy.scope():
        model.compile(keras.optimizers.Adam(0.01), **options)
    return model


def _network_compiled() -> keras.Model:
    model = _network()
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    return model


def _loss_before_normalization() -> keras.Model:
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activity_regularizer=keras.regularizers.L2(0.1))(inputs)
    hidden = keras.layers.BatchNormalization()(hidden)
    model = keras.Model(inputs, keras.layers.Dense(3, "softmax")(hidden))
    return _compiled(model, loss="sparse_categorical_crossentropy")


def _same_lookups_on_all() -> keras.Model:
    class Positions(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.table = keras.layers.Embedding(6, 4)

        def call(self, x: Any) -> Any:
            return x[:, :, None] + self.table(tf.range(6))

    layers = [keras.Input((6,)), Positions(), keras.layers.Flatten(), keras.layers.Dense(3)]
    return _compiled(keras.Sequential(layers), loss=_from_logits)


def _from_logits(y: Any, outputs: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)


def _loss_by_logits() -> keras.Model:
    def loss(y: Any, outputs: Any) -> Any:
        found = keras.losses.sparse_categorical_crossentropy(y, outputs)
        return tf.sqrt(tf.reduce_mean(found))

    layers = [keras.Input((6,)), keras.layers.Dense(3), keras.layers.Activation("softmax")]
    model = keras.Sequential(layers)
    model.layers[0].set_weights([np.full((6, 3), 9.0) * [[1, 2, 3]], np.zeros(3)])
    return _compiled(model, loss=loss)


def _result_under_another_name() -> keras.Model:
    class Named(keras.Model):
        def train_step(self, data: Any) -> Any:
            return {"score": super().train_step(data)["auc"]}

    inputs = keras.Input((6,))
    model = Named(inputs, keras.layers.Dense(1, "sigmoid")(inputs))
    return _compiled(model, loss="mse", metrics=["auc"])


def _vector_loss(rank: int) -> Callable[[], keras.Model]:
    """Returns a function that makes a model whose train_step has a loss of this rank."""

    class Vector(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.square(self(x, training=True) - tf.one_hot(y, 3))
                loss = loss if rank == 2 else tf.reduce_sum(loss, -1)
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": tf.reduce_mean(loss)}

    def build() -> keras.Model:
        inputs = keras.Input((6,))
        return _compiled(Vector(inputs, keras.layers.Dense(3)(inputs)))

    return build


def _spread_of_the_batch() -> keras.Model:
    class Spread(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            spread = keras.ops.mean(keras.ops.std(x, axis=0))
            return keras.ops.concatenate([x, spread * keras.ops.ones_like(x[:, :1])], -1)

    layers = [keras.Input((6,)), keras.layers.Dense(4, "tanh"), Spread(), keras.layers.Dense(3)]
    return _compiled(keras.Sequential(layers), loss=_from_logits)


class Patch(NamedTuple):
    """A model that trains wrongly if the `parts` of tfmulti are replaced."""

    build: Callable[[], keras.Model]
    parts: list[tuple[Any, str, Any]]


# GPUs multiply float32 numbers as TensorFloat-32.
AS_ON_A_GPU = (step_comparison, "_unit_of", lambda model, placement: 2.0**-11)
NOT_KNOWN = (global_values, "are_known", lambda replica_slice: False)
NOT_DIVIDED = (global_builder.Builder, "_over_weight", lambda self, value: value)
PATCHES = {
    "losses left by other replicas": Patch(
        _loss_before_normalization,
        [(layers, "_left_by_step", lambda layer: {})],
    ),
    "rows of a table that all replicas look up": Patch(
        _same_lookups_on_all,
        [(replica_context, "lookups_in", lambda g: [Lookup(g.values, g.indices, False)])],
    ),
    "logits of gathered rows": Patch(_loss_by_logits, [NOT_KNOWN, (losses, "ATTACHED", ())]),
    "a result under another name": Patch(
        _result_under_another_name,
        [NOT_KNOWN, (StepLogs, "_result_of", lambda self, value: None)],
    ),
    "a vector loss of rank 1": Patch(_vector_loss(1), [NOT_DIVIDED]),
    "a vector loss of rank 2": Patch(_vector_loss(2), [NOT_DIVIDED]),
    "a spread over the rows": Patch(_spread_of_the_batch, [NOT_KNOWN]),
    "no scope": Patch(_network_compiled, [(relocation, "adopt", lambda model, strategy: 0)]),
}


def verified_with_and_without_a_patch(case: str) -> Any:
    """Returns the message of `verify` with the parts of tfmulti, and without them.

    After a colon the case names the digits with which the model computes.
    """
    found = []
    case, _, digits = case.partition(":")
    patch = PATCHES[case]
    last_digit = [AS_ON_A_GPU] if digits == "TensorFloat-32" else []
    for parts in (last_digit, [*last_digit, *patch.parts]):
        keras.utils.set_random_seed(1)
        keras.config.set_dtype_policy("mixed_bfloat16" if digits == "bfloat16" else "float32")
        with contextlib.nullcontext() if case == "no scope" else here.strategy.scope():
            model = patch.build()
        keras.config.set_dtype_policy("float32")
        with contextlib.ExitStack() as replaced:
            for part in parts:
                replaced.enter_context(mock.patch.object(*part))
            try:
                fit(prepare(model, verify=True), **{**ONE_STEP, "y": Y[:18] % 2})
                found.append("same")
            except VerificationError as error:
                found.append(str(error))
    return found


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _passed_on(x: Any) -> Any:
    """Returns its input. Nothing tells how its gradient depends on the rows."""
    return tf.identity(x), lambda upstream: upstream


class NotUnderstood(keras.Model):
    """A model whose step named by `at` has a value that is not understood, but is right."""

    at = ""
    has_condition = has_python = False

    def _of(self, value: Any) -> Any:
        if self.has_python:
            # No tensor depends on what the Python function returns.
            kept = tf.numpy_function(lambda rows: np.int32(0), [value], tf.int32)
            with tf.control_dependencies([kept]):
                return tf.identity(value)
        if self.has_condition:
            weight = self.trainable_variables[0]

            # A branch that reads a variable cannot be computed again from other values.
            def other() -> Any:
                return value + tf.reduce_sum(weight)

            return tf.cond(self.optimizer.iterations >= 0, lambda: tf.identity(value), other)
        return _passed_on(value)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(_from_logits(y, self(x, training=True)))
            loss = self._of(loss) if self.at == "train_step" else loss
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}

    def test_step(self, data: Any) -> Any:
        loss = tf.reduce_mean(_from_logits(data[1], self(data[0])))
        return {"loss": self._of(loss) if self.at == "test_step" else loss}

    def predict_step(self, data: Any) -> Any:
        found = self(data)
        # The mean is of all rows, so its gradient is not that of single rows.
        mean = tf.reduce_mean(found, 0, keepdims=True)
        return found + 0.0 * self._of(mean) if self.at == "predict_step" else found


def warnings_of_values_that_are_not_understood(case: str) -> Any:
    """Returns the warnings of `fit`, `evaluate` and `predict`, and the verdict.

    The case names a step. After a colon it says whether the step has a condition or a Python
    function, or whether the first step is not compared with one device.
    """
    at, _, more = case.partition(":")
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        inputs = keras.Input((6,))
        model = NotUnderstood(inputs, keras.layers.Dense(3)(inputs))
        model.at, model.has_condition = at, more == "condition"
        model.has_python = more.startswith("python")
        model.compile("sgd")
    passes = 2 if more == "python in passes" else 1
    prepare(model, verify=False if more == "not compared" else None, microbatches=passes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, **ONE_STEP)
        model.evaluate(X[:18], Y[:18], batch_size=18, verbose=0)
        model.predict(X[:18], batch_size=18, verbose=0)
    told = [str(w.message) for w in caught if "it is not known" in str(w.message)]
    verification = state_of(model).verification
    return [told, verification and verification.verdict]


class Writes(NotUnderstood):
    """A model whose step named by `at` prints, or writes to a file, a table or a queue."""

    how = ""

    def _of(self, value: Any) -> Any:
        def write() -> Any:
            if self.how == "file":
                return tf.io.write_file(str(here.shared / "value"), tf.strings.as_string(value))
            if self.how == "summary":
                with self.writer.as_default():
                    return tf.summary.scalar("value", tf.reduce_mean(value), step=1)
            if self.how == "table":
                return self.table.insert(tf.ones((1,), tf.int64), tf.reduce_mean(value)[None])
            if self.how == "queue":
                return self.queue.enqueue(tf.reduce_mean(value))
            return tf.print(value, output_stream=f"file://{here.shared / 'printed'}")

        if self.how == "print in a condition":
            tf.cond(tf.reduce_sum(value) > -1e9, write, tf.no_op)
        else:
            write()
        return value


def warnings_of_outputs(case: str) -> Any:
    """Returns the warnings of a step that prints or writes, which is traced in two calls of `fit`.

    The case names the step, and after a colon how it writes.
    """
    at, _, how = case.partition(":")
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        inputs = keras.Input((6,))
        model = Writes(inputs, keras.layers.Dense(3)(inputs))
        model.at, model.how = at, how
        model.writer = tf.summary.create_file_writer(str(here.shared / "summary"))
        model.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
        model.queue = tf.queue.FIFOQueue(100, [tf.float32], [[]])
        model.compile("sgd")
    prepare(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            fit(model, **ONE_STEP)
            model.evaluate(X[:18], Y[:18], batch_size=18, verbose=0)
            model.predict(X[:18], batch_size=18, verbose=0)
            model.compile("sgd")
    return [str(w.message) for w in caught if "prints, or writes" in str(w.message)]


class OfWeightedRows(NotUnderstood):
    """A model whose step has a value that is not understood if the rows have weights."""

    def train_step(self, data: Any) -> Any:
        self.at = "train_step" if len(data) == 3 else ""
        return super().train_step(data[:2])


def warnings_of_another_structure() -> Any:
    """Returns the warnings of a `fit` without weights, and those of a second one with weights."""
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        inputs = keras.Input((6,))
        model = OfWeightedRows(inputs, keras.layers.Dense(3)(inputs))
        model.compile("sgd")
    prepare(model)
    found = []
    for weights in ({}, {"sample_weight": np.ones(18)}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(model, **ONE_STEP, **weights)
        found.append([str(w.message) for w in caught if "it is not known" in str(w.message)])
    return [*found, state_of(model).verification.verdict]


def _by_python(x: Any) -> Any:
    """Returns the tangent of each value, computed by Python outside of the graph."""
    return tf.ensure_shape(tf.numpy_function(np.tanh, [x], tf.float32), (None, 6))


def warnings_of_an_evaluation(layer: str) -> list[str]:
    """Returns the warnings of `evaluate` with a layer that is "understood" or not."""
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        inputs = keras.Input((6,))
        function = _by_python if layer == "not understood" else keras.ops.tanh
        hidden = keras.layers.Lambda(function, output_shape=(6,))(inputs)
        outputs = keras.layers.Dense(1, "sigmoid")(hidden)
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse", metrics=[keras.metrics.AUC()])
    prepare(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.evaluate(X[:18], Y[:18, None] > 0, batch_size=18, verbose=0)
    return [str(w.message) for w in caught if "it is not known" in str(w.message)]


class Begins(keras.metrics.Metric):
    """Counts from a number on, which `reset_state` sets, or leaves, or makes 0 as Keras does."""

    def __init__(self, case: str) -> None:
        super().__init__(name="begins")
        self.case = case
        self.total = self.add_variable((), "ones", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(keras.ops.mean(y_pred))

    def result(self) -> Any:
        return self.total + 0.0

    def reset_state(self) -> None:
        if self.case == "zeros":
            super().reset_state()
        elif self.case == "sets":
            self.total.assign(1.0)


def warnings_of_a_metric(case: str) -> Any:
    """Returns the warnings of `evaluate`, and its result, of a metric that begins with 1."""
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, "sigmoid")])
        model.compile("sgd", "mse", metrics=[Begins(case)])
    prepare(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = model.evaluate(X[:18], Y[:18, None] > 0, batch_size=18, verbose=0)[-1]
    return [[str(w.message) for w in caught if "begins with" in str(w.message)], found]


class Cell(keras.layers.Layer):
    """A recurrent cell of the user's own."""

    state_size = 3

    def build(self, shape: Any) -> None:
        self.dense = keras.layers.Dense(3)
        self.dense.build((None, shape[-1] + 3))

    def call(self, x: Any, states: Any) -> Any:
        out = tf.nn.silu(self.dense(keras.ops.concatenate([x, states[0]], -1)))
        return out, [out]


class Solved(keras.layers.Layer):
    """A layer that repeats a step until all rows are solved. At first each row is."""

    def build(self, shape: Any) -> None:
        self.weight = self.add_weight(shape=(shape[-1], shape[-1]), initializer="zeros")

    def call(self, x: Any) -> Any:
        def change(old: Any, moved: Any) -> Any:
            new = keras.ops.tanh(old @ tf.convert_to_tensor(self.weight) + x)
            return new, tf.reduce_max(tf.abs(new - old))

        return tf.while_loop(lambda _, moved: moved > 1e-2, change, (tf.zeros_like(x), 1.0))[0]


class Repeated(keras.Operation):
    """An operation that repeats a step until all rows are small. It reads a plain variable."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = tf.Variable(0.5, trainable=False)

    def call(self, x: Any) -> Any:
        return tf.while_loop(lambda z: tf.reduce_max(z) > 1e3, lambda z: [z * self.rate], [x])[0]

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(x.shape, x.dtype)


class Lookups(keras.Model):
    """A model whose step clips the gradients of lookups, or multiplies them "by hand"."""

    by_hand = False

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x)))
        weights = self.trainable_variables
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, weights), 1.0)
        if self.by_hand:
            lookups = gradients[0]
            gradients[0] = tf.IndexedSlices(lookups.values * 1.0, lookups.indices)
        self.optimizer.apply(gradients, weights)
        return {"loss": loss}


class Slopes(keras.layers.Layer):
    """Adds the derivatives of each row by itself, with a weight that is 0 behind `through`."""

    def __init__(self, through: keras.layers.Layer | None = None) -> None:
        super().__init__()
        self.through = through

    def build(self, shape: Any) -> None:
        if self.through is not None:
            self.through.build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = x if self.through is None else self.through(x, training=training)
            found = tf.tanh(found)
        slopes = tf.reduce_sum(tape.batch_jacobian(found, x), 1)
        return x + (slopes if self.through is None else 0.0 * slopes)


LAYERS: dict[str, Callable[[], Any]] = {
    "recomputed": lambda: keras.layers.Lambda(tf.recompute_grad(lambda x: tf.tanh(x) * x)),
    "recomputed mixed rows": lambda: keras.layers.Lambda(
        tf.recompute_grad(lambda x: tf.tanh(x) + 0.0 * tf.reduce_mean(x, 0))
    ),
    "jacobian": Slopes,
    "jacobian of a normalization": lambda: Slopes(keras.layers.BatchNormalization()),
    "loop until all rows are solved": Solved,
    "loop of an operation": Repeated,
    "custom gradient": lambda: keras.layers.Lambda(_passed_on),
    "custom gradient in a condition": lambda: keras.layers.Lambda(
        lambda x: tf.cond(tf.constant(True), lambda: _passed_on(x), lambda: x)
    ),
    "recurrent cell": lambda: keras.Sequential(
        [keras.layers.Reshape((2, 3)), keras.layers.RNN(Cell())]
    ),
    "scan": lambda: keras.layers.Lambda(_cumulated),
    "lookups": lambda: keras.layers.Embedding(9, 3),
    "lookups by hand": lambda: keras.layers.Embedding(9, 3),
}


def _cumulated(x: Any) -> Any:
    steps = keras.ops.transpose(keras.ops.reshape(x, (-1, 2, 3)), (1, 0, 2))
    return keras.ops.scan(
        lambda sum, step: (sum + step, sum), keras.ops.zeros_like(steps[0]), steps
    )[0]


def warnings_of_a_layer(case: str) -> Any:
    """Returns the warnings of `fit` and `evaluate` with a layer of the user's own."""
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        looks_up = case.startswith("lookups")
        inputs = keras.Input((6,), dtype="int32" if looks_up else "float32")
        hidden = LAYERS[case]()(inputs)
        outputs = keras.layers.Dense(1)(keras.layers.Flatten()(hidden))
        model = (Lookups if looks_up else keras.Model)(inputs, outputs)
        model.by_hand = case.endswith("by hand")
        model.compile("sgd", "mse")
    prepare(model)
    x = np.abs(X[:18]).astype("int32") if looks_up else X[:18]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, **{**ONE_STEP, "x": x, "y": Y[:18, None].astype("float32")})
        model.evaluate(x, Y[:18, None].astype("float32"), batch_size=18, verbose=0)
    told = [str(w.message) for w in caught if "it is not known" in str(w.message)]
    return [told, state_of(model).verification.verdict]


class TwoAdams(keras.Sequential):
    """A model whose step has an optimizer of its own, which is not built before the first step."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(_from_logits(y, self(x, training=True)))
        weights = self.trainable_variables
        self.own.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def verified_with_an_optimizer_that_is_not_built(mode: str) -> Any:
    """Returns the verdict, and the history of two epochs, with "eager" steps or in a "graph".

    In the mode "eager before fit" a call of `verify` makes the comparison.
    """
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        model = TwoAdams([keras.Input((6,)), keras.layers.Dense(3)])
        model.own = keras.optimizers.Adam(0.01)
        model.compile("adam", run_eagerly=mode != "graph")
    prepare(model, verify=True)
    if mode == "eager before fit":
        verify(model, X, Y, batch_size=24)
    history = fit(model, **ONE_STEP | {"epochs": 2})
    return [state_of(model).verification.verdict, history["loss"]]


class Counting(keras.Model):
    """A step that divides its loss by the number of its calls."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls, self.squares = 0, False

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.calls += 1
        with tf.GradientTape() as tape:
            found = tf.reduce_mean(_from_logits(y, self(x, training=True)))
            loss = (found**2 if self.squares else found) / max(self.calls, 1)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss, "calls": self.calls, "text": f"call {self.calls}"}


def _counting(*, eagerly: bool, squares: bool = False, **prepared: Any) -> Any:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        inputs = keras.Input((6,))
        model = prepare(Counting(inputs, keras.layers.Dense(3)(inputs)), **prepared)
        model.squares = squares
        model.compile("sgd", run_eagerly=eagerly)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = {"x": X, "y": Y, "batch_size": 24, "epochs": 2, "verbose": 0}
        history = model.fit(**given).history
    told = [str(w.message) for w in caught if "in Python" in str(w.message)]
    history["text"] = list(map(str, history["text"]))
    return [history, told]


def steps_counted_in_python(mode: str) -> Any:
    """Returns the history, with "eager" steps or functions or in a "graph", and the warnings."""
    tf.config.run_functions_eagerly(mode == "eager functions")
    try:
        return _counting(eagerly=mode == "eager")
    finally:
        tf.config.run_functions_eagerly(False)


def steps_counted_in_passes(mode: str) -> Any:
    """Returns the history of steps that take two passes."""
    return _counting(eagerly=mode == "eager", microbatches=2, verify=False)


class CountsInPython(keras.layers.Layer):
    calls = 0

    def call(self, x: Any) -> Any:
        self.calls += 1
        return x


def predictions_counted_in_python() -> Any:
    """Returns how many warnings the predictions of a model give whose layer counts in Python."""
    words = "the predict_step changes CountsInPython.calls in Python"
    return sum(words in message for message in _warnings_with(CountsInPython))


def _warnings_with(make_layer: Callable[[], keras.layers.Layer]) -> list[str]:
    """Returns the warnings if a model with a layer predicts and is evaluated twice."""
    with here.strategy.scope():
        model = keras.Sequential([keras.Input((6,)), make_layer()])
        model.compile("sgd", "mse")
    prepare(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.predict(X, batch_size=24, verbose=0)
            model.evaluate(X, X, batch_size=24, verbose=0)
    return [str(warning.message) for warning in caught]


class Scaled(keras.layers.Layer):
    scale = 1.0

    def call(self, x: Any) -> Any:
        return x * self.scale


def a_number_changed_between_predictions() -> Any:
    """Returns the warnings of three predictions. The second and the third find a new number."""
    with here.strategy.scope():
        model = keras.Sequential([keras.Input((6,)), Scaled()])
        model.compile("sgd", "mse")
    prepare(model)
    found = []
    for rows, scale in ((20, 1.0), (20, 2.0), (24, 2.0)):
        model.layers[-1].scale = scale
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.predict(X[:rows], batch_size=12, verbose=0)
        found.append([str(w.message) for w in caught if "Scaled.scale" in str(w.message)])
    return found


def values_changed_between_calls() -> Any:
    """Returns for each of seven calls of a model what its warnings say about changed values.

    Before some of the calls the user changes a number or `trainable`, or compiles the model again.
    """
    with here.strategy.scope():
        layers = [keras.layers.Dropout(0.5, name="drop"), Scaled(), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile("sgd", "mse")
    prepare(model, verify=False)
    drop, scaled, dense = model.layers
    x, y = X[:24], X[:24, :3]
    calls: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (lambda: None, lambda: fit(model, x=x, y=y)),
        (lambda: setattr(drop, "rate", 0.1), lambda: fit(model, x=x, y=y)),
        (lambda: None, lambda: fit(model, x=x, y=y)),
        (lambda: model.compile("sgd", "mse"), lambda: fit(model, x=x, y=y)),
        (lambda: setattr(dense, "trainable", False), lambda: model.train_on_batch(x, y)),
        (lambda: None, lambda: model.evaluate(x, y, verbose=0)),
        (lambda: setattr(scaled, "scale", 2.0), lambda: model.test_on_batch(x, y)),
    ]
    found = []
    for change, call in calls:
        change()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        told = [str(w.message).partition(" was traced, which keeps the old value") for w in caught]
        found.append([words for words, separator, _ in told if separator])
    return found


class DrawsInPython(keras.layers.Layer):
    """Adds a random number of a kind that TensorFlow's graph does not have."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.rng = kind, np.random.default_rng(1)

    def call(self, x: Any) -> Any:
        draws = {
            "python": random.random,
            "numpy": np.random.rand,
            "own generator": self.rng.random,
        }
        return x + draws[self.kind]()


class MakesAnInitializer(keras.layers.Layer):
    """Draws a seed from Python's generator by Keras alone."""

    def call(self, x: Any) -> Any:
        return x + keras.initializers.HeNormal().seed * 0.0


def numbers_drawn_in_python(kind: str) -> Any:
    """Returns the warnings of `predict` and `evaluate` with a layer that draws in Python."""
    told = _warnings_with(lambda: MakesAnInitializer() if kind == "seeds" else DrawsInPython(kind))
    return [message for message in told if "draws numbers" in message]


class ReadsFromOutside(keras.layers.Layer):
    """Adds the length of a file by a function that its `call` runs."""

    def length_of_a_file(self) -> int:
        return len(Path(__file__).read_bytes())

    def call(self, x: Any) -> Any:
        return x + 0.0 * self.length_of_a_file()


def values_read_from_outside() -> Any:
    """Returns the warnings of `predict` and `evaluate` with a layer that reads a file."""
    return [words for words in _warnings_with(ReadsFromOutside) if "may read" in words]


class SetsItself(keras.layers.Layer):
    """Sets a variable by its first batch, as a normalization by the data does."""

    ready = False

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", trainable=False)

    def call(self, x: Any) -> Any:
        if not self.ready:
            self.ready = True
            self.scale.assign(keras.ops.mean(x, 0))
        return x * self.scale


class SwitchesInTests(keras.Model):
    """A test_step that multiplies by ten the first time that its Python code runs."""

    first = True

    def test_step(self, data: Any) -> Any:
        x, y = data
        factor = 10.0 if self.first else 1.0
        self.first = False
        return {"found": keras.ops.mean((self(x) - y) ** 2) * factor}


def a_switched_boolean(case: str) -> Any:
    """Returns what tells of a Boolean that a step switches in Python: a warning or an error."""
    with here.strategy.scope():
        if case == "by a test_step":
            inputs = keras.Input((6,))
            model: Any = SwitchesInTests(inputs, keras.layers.Dense(6)(inputs))
        else:
            model = keras.Sequential([SetsItself()])
            model.build((None, 6))
            model.layers[0].ready = False
        model.compile("sgd", "mse")
    prepare(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if case == "by a prediction":
                model.predict(X, batch_size=24, verbose=0)
            else:
                model.evaluate(X, X, batch_size=24, verbose=0)
        except ModelError as error:
            return [f"ModelError: {error}"]
    return [words for words in (str(w.message) for w in caught) if "in Python" in words]


class Noisy(keras.Model):
    """A step that draws by Keras without a seed, and counts how often it is traced."""

    def train_step(self, data: Any) -> Any:
        logging.getLogger("traces").error("traced")
        x, y = data
        return super().train_step((x + keras.random.normal(tf.shape(x)), y))


class NoisyInPython(Noisy):
    """Draws in Python, too."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        return super().train_step((x * random.random(), y))


def traces_of_a_step_with_draws(draws: str) -> Any:
    """Returns how often the Python code of a step ran that draws by Keras without a seed."""
    # A number or a list would be a value in Python that the step changes.
    traces: list[Any] = []
    handler = logging.Handler()
    handler.emit = traces.append  # type: ignore[assignment, method-assign]
    logging.getLogger("traces").addHandler(handler)
    keras.utils.set_random_seed(1)
    # Keras makes its own generator at the first draw.
    keras.backend.clear_session()
    with here.strategy.scope():
        inputs = keras.Input((6,))
        kind = Noisy if draws == "by Keras" else NoisyInPython
        model = kind(inputs, keras.layers.Dense(3)(inputs))
        model.compile("sgd", "mse")
    prepare(model, verify=False)
    fit(model, x=X, y=X[:, :3], batch_size=24)
    return len(traces)


def warnings_of_eager_code(case: str) -> Any:
    """Returns the warnings of eager steps with a layer of the user's `own`, or of Keras alone."""
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        inputs = keras.Input((6,))
        layer = keras.layers.Lambda(lambda x: x * 2) if case == "own" else keras.layers.Dense(6)
        model = prepare(keras.Model(inputs, keras.layers.Dense(3)(layer(inputs))), verify=False)
        model.compile("sgd", "mse", run_eagerly=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.fit(X, X[:, :3], batch_size=24, epochs=2, verbose=0)
            model.evaluate(X, X[:, :3], batch_size=24, verbose=0)
            model.predict(X, batch_size=24, verbose=0)
    return [words for words in (str(w.message) for w in caught) if "run_eagerly=True" in words]


class UpdatesTheLastLayer(keras.Model):
    """A step that updates the weights of the last layer alone."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        weights = self.layers[-1].trainable_variables
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def warnings_of_unused_slots(case: str) -> Any:
    """Returns the warnings of slots that no step updates, and the numbers of slots."""
    optimizer, mode = case.split()
    with here.strategy.scope():
        inputs = keras.Input((6,))
        outputs = keras.layers.Dense(3)(keras.layers.Dense(4)(inputs))
        model = prepare(UpdatesTheLastLayer(inputs, outputs))
        model.compile(optimizer, "mse", run_eagerly=mode == "eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, X[:, :3], batch_size=24, epochs=2, verbose=0)
    told = [str(w.message) for w in caught if "has slots for all" in str(w.message)]
    return told, len(model.optimizer.variables)


def wrong_steps_counted_in_python() -> Any:
    return _counting(eagerly=True, squares=True)


class Checked(keras.Model):
    """A model whose step passes its inputs through a `check` that changes nothing."""

    check = ""

    def train_step(self, data: Any) -> Any:
        x, y = data
        if self.check == "rows":
            with tf.control_dependencies([tf.debugging.assert_greater(tf.shape(x)[0], 1)]):
                x = tf.identity(x)
        if self.check == "printed":
            tf.print("rows:", tf.shape(x)[0])
        if self.check == "looped":
            x = tf.while_loop(lambda x: False, lambda x: x, [x])[0]
        return super().train_step((x, y))


def rows_of_one_device(check: str) -> Any:
    """Returns the verdict, and the rows and the traces of each run on one device.

    In the first run the replicas are still computing.
    """
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        inputs = keras.Input((6,))
        model = Checked(inputs, keras.layers.Dense(3, "softmax")(inputs))
        model.check = check
        model.compile("sgd", "sparse_categorical_crossentropy")
    prepare(model)
    runs: list[Any] = []
    original = PlainRun.run

    def run(self: PlainRun, step: Any, batches: Any, **options: Any) -> Any:
        runs.append([len(batches[0][0]), len(traces_of(step))])
        return original(self, step, batches, **options)

    with mock.patch.object(PlainRun, "run", run):
        fit(model, **{**ONE_STEP, "x": X[:15], "y": Y[:15]})
    verification = state_of(model).verification
    return [verification and verification.verdict, runs]


def verified_biases_before_batch_normalization() -> Any:
    """The gradients of these biases are only rounding errors, which Adam scales to whole steps."""

    class Steps(keras.Model):
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    keras.utils.set_random_seed(1)
    images = np.random.default_rng(4).random((48, 24, 24, 3)).astype(np.float32)
    with here.strategy.scope():
        inputs = keras.Input((24, 24, 3))
        x = inputs
        for filters in (3, 1, 2, 1):
            x = keras.layers.Conv2D(filters, 3, padding="same", bias_initializer="uniform")(x)
            x = keras.layers.Activation("relu")(keras.layers.BatchNormalization()(x))
        outputs = keras.layers.Dense(3, "softmax")(keras.layers.Flatten()(x))
        model = prepare(Steps(inputs, outputs), verify=True)
        model.compile(keras.optimizers.Adam(), "sparse_categorical_crossentropy")
    model.fit(images, Y[:48], batch_size=48, shuffle=False, verbose=0)
    found = state_of(model).verification
    return [found.verdict, found.quantities > 30]


def verified_again_from_other_weights() -> Any:
    """Returns the verdict, the number of comparisons, and whether the weights are as before.

    The first comparison finds a difference, as if rounding had decided about a ReLU.
    """
    calls = []

    def first_of(found: Any) -> Any:
        calls.append(len(found))
        difference = Difference("weight", "a kernel", 1.0, 0.1, 1.0, 2.0)
        return difference if len(calls) == 1 else real_first_of(found)

    real_first_of = comparison.first_of
    model = _own()
    with here.strategy.scope():
        model(X[:2])
    before = [np.asarray(v) for v in model.variables]
    with mock.patch.object(comparison, "first_of", first_of):
        found = verify(model, X[:18], Y[:18], batch_size=15)
    after = [np.asarray(v) for v in model.variables]
    same = [np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
    return [found.verdict, len(calls), all(same)]


def state_after_a_failed_verification() -> Any:
    model = _own("loss")
    with here.strategy.scope():
        model(X[:2])
    before = [np.asarray(v) for v in model.variables]
    raised = ""
    try:
        fit(model, **ONE_STEP)
    except Exception as error:
        raised = type(error).__name__
    after = [np.asarray(v) for v in model.variables]
    same = [np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
    return [raised, all(same), int(model.optimizer.iterations.numpy())]


def verified_with_a_learning_rate_of_zero() -> Any:
    """A warm-up starts at 0, where a wrong gradient moves no weight."""
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        model = Own("loss")
        model.second.learning_rate = 0.0
        warm_up = keras.optimizers.schedules.CosineDecay(0.0, 10, 0.0, warmup_target=0.1)
        model.compile(keras.optimizers.SGD(warm_up))
    fit(prepare(model), **ONE_STEP)


def verified_with_clipped_gradients(case: str) -> None:
    """Clipping gives a gradient that is wrong by a factor the right size."""
    keras.utils.set_random_seed(1)
    clips = {case: 1e-3}
    with here.strategy.scope():
        model = Own("loss")
        model.second = keras.optimizers.SGD(0.1, momentum=0.9, **clips)
        model.compile(keras.optimizers.Adam(0.01, **clips))
    fit(prepare(model), **ONE_STEP)


def verified_with_a_step_that_is_an_attribute() -> Any:
    """Returns the verdict with clipping, the losses, and whether the model still has the step."""
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        inputs = keras.Input((6,))
        model = prepare(keras.Model(inputs, keras.layers.Dense(3)(inputs)))

        def step(data: Any) -> Any:
            x, y = data
            # All traces that are compared must draw the same number.
            rate = random.random()
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(_from_logits(y, model(x))) * rate
            weights = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"own": loss}

        model.train_step = step
        model.compile(keras.optimizers.Adam(0.01, clipnorm=0.1))
    random.seed(4)
    logs = fit(model, **ONE_STEP | {"epochs": 2})
    return [state_of(model).verification.verdict, logs["own"], model.train_step is step]


class CountsCalls(keras.layers.Layer):
    """Counts its calls, of which each pass of a step makes one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.add_weight(initializer="zeros", trainable=False, name="calls")

    def call(self, x: Any) -> Any:
        self.calls.assign_add(1.0)
        return x


def steps_of_passes_that_count() -> None:
    with here.strategy.scope():
        model = keras.Sequential([keras.Input((6,)), CountsCalls(), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    fit(prepare(model, microbatches=2), y=X[:, :3])


def passes_that_count_their_rows(case: str) -> str:
    """Keras' loss tracker and a step of the user's own count the rows of the batch."""

    class Sum(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                errors = tf.square(self(x, training=True) - y)
                loss = tf.reduce_sum(errors) / tf.cast(tf.shape(x)[0], tf.float32)
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"own": loss, "rows": tf.shape(x)[0]}

    with here.strategy.scope():
        inputs = keras.Input((6,))
        model = (Sum if case == "own" else keras.Model)(inputs, keras.layers.Dense(3)(inputs))
        model.compile("sgd", "mse")
    fit(prepare(model, microbatches=2, verify=True), y=X[:, :3])
    verdict: str = state_of(model).verification.verdict
    return verdict


def passes_with_losses_of_layers() -> Any:
    """Returns the verdict on a model whose only losses come from layers."""

    class EndPoint(keras.layers.Layer):
        def call(self, x: Any, y: Any) -> Any:
            self.add_loss(tf.reduce_mean(tf.square(x - y)))
            return x

    with here.strategy.scope():
        inputs, targets = keras.Input((6,)), keras.Input((3,))
        outputs = EndPoint()(keras.layers.Dense(3, activity_regularizer="l2")(inputs), targets)
        model = keras.Model([inputs, targets], outputs)
        model.compile("sgd")
    model = prepare(model, microbatches=2, verify=True)
    model.fit([X[:24], X[:24, :3]], batch_size=12, verbose=0)
    return state_of(model).verification.verdict


def warnings_of_passes_that_normalize() -> Any:
    """Returns how many warnings `fit` gives with BatchNormalization.

    There is one pass, then two, and then two with a layer that does not train.
    """
    found = []
    for passes, trains in ((1, True), (2, True), (2, False)):
        with here.strategy.scope():
            layers = [keras.layers.BatchNormalization(trainable=trains), keras.layers.Dense(3)]
            model = keras.Sequential([keras.Input((6,)), *layers])
            model.compile("sgd", "mse")
        prepare(model, microbatches=passes)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(model, x=X[:24], y=X[:24, :3])
        words = "BatchNormalization takes its statistics from one microbatch at a time"
        found.append(sum(words in str(w.message) for w in caught))
    return found


def train_on_batch_with_a_mistake(case: str) -> None:
    """Trains a wrong model on one batch, without the global values that would correct it."""
    model = _own(case)
    with mock.patch.object(global_values, "are_known", return_value=False):
        model.train_on_batch(X[:15], Y[:15])


class Weighted(keras.Model):
    """A model whose loss is multiplied by a number that a callback sets."""

    weight = 1.0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * self.weight


class Weighs(keras.callbacks.Callback):
    """Sets the number when something begins for the first time."""

    def __init__(self, when: str) -> None:
        super().__init__()
        setattr(self, f"on_{when}_begin", self._set)

    def _set(self, *_: Any, **__: Any) -> None:
        self.model.weight = 0.5


def callback_before_the_first_step(when: str) -> Any:
    """Returns the history of a model that a callback changes before its step is traced."""
    plain = _network()
    with here.strategy.scope():
        model = Weighted(inputs=plain.inputs, outputs=plain.outputs)
        _compile(model)
    history = fit(prepare(model), x=X[:50], y=Y[:50], callbacks=[Weighs(when)], shuffle=False)
    return [list(history.values()), state_of(model).verification is not None]


class Idle(keras.callbacks.Callback):
    """A callback of the user's own that changes nothing."""


def callback_of_the_chief_alone() -> Any:
    """Returns what the comparison found if the chief alone has a callback of the user's own."""
    model = _own()
    fit(model, callbacks=[] if here.placement.rank else [Idle()])
    return state_of(model).verification.verdict


def other_batches_on_each_worker(method: str) -> None:
    """Trains a model with a step of its own on rows that each worker chooses."""
    first = 16 * here.placement.rank
    x, y = X[first : first + 15], Y[first : first + 15]
    model = _own()
    if method == "train_on_batch":
        model.train_on_batch(x, y)
    else:
        fit(model, x=tf.data.Dataset.from_tensors((x, y)), y=None)


def batches_with_and_without_verification(mode: str) -> Any:
    """Returns the verdict of `train_on_batch`, and whether it changes nothing else."""
    runs = []
    for asked in (None, False):
        keras.utils.set_random_seed(1)
        with here.strategy.scope():
            model = Own()
            model.compile(keras.optimizers.Adam(0.01), run_eagerly=mode == "eager")
        prepare(model, verify=asked)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logs = [model.train_on_batch(X[:n], Y[:n]) for n in (15, 16, 15)]
        runs.append((logs, _state(model)))
        if asked is None:
            found = state_of(model).verification
    (logs, state), (expected_logs, expected_state) = runs
    is_same = all(np.array_equal(a, b) for a, b in zip(state, expected_state, strict=True))
    return [found.verdict, found.steps, is_same, logs == expected_logs]


def reasons_to_skip_verification() -> Any:
    """Returns the reasons of two options, and the verification of a plain Keras model."""
    keras.utils.set_random_seed(1)
    reasons = []
    for options in ({"sync_batch_norm": False}, {"microbatches": 2}):
        with here.strategy.scope():
            model = prepare(_network(normalizes=True), verify=True, **options)
            model.compile("sgd", "sparse_categorical_crossentropy")
        reasons.append(verify(model, X, Y).reason)
    with here.strategy.scope():
        plain = prepare(_network())
        plain.compile("sgd", "sparse_categorical_crossentropy")
    fit(plain, **ONE_STEP)
    return [*reasons, state_of(plain).verification]


def batches_after_verification() -> Any:
    """Returns whether `fit` trains on the same batches as without verification, for all data."""

    class Rows(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return X[index * 12 :][:12], Y[index * 12 :][:12]

    def generated() -> Any:
        for index in range(6):
            noise = np.random.normal(size=(12, 6)).astype(np.float32)
            yield X[index % 3 * 12 :][:12] + noise, Y[index % 3 * 12 :][:12]

    def shuffled() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((X[:36], Y[:36])).shuffle(36, seed=1)

    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "dataset": lambda: {"x": shuffled().batch(12)},
        "of unknown length": lambda: {"x": shuffled().filter(lambda x, y: y < 3).batch(12)},
        "pydataset": lambda: {"x": Rows()},
        "generator": lambda: {"x": generated(), "steps_per_epoch": 3},
    }
    same = {}
    for name, data in kinds.items():
        found = []
        for asked in (True, False):
            keras.utils.set_random_seed(1)
            with here.strategy.scope():
                model = prepare(
                    keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "softmax")]),
                    verify=asked,
                )
                at_once = 2 if name == "dataset" else 1
                model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=at_once)
            given = {"y": None, "batch_size": None, "shuffle": False, **data()}
            history = fit(model, **given)
            found.append([history, [np.asarray(w).tolist() for w in model.weights]])
            if asked:
                verdict = state_of(model).verification.verdict
        same[name] = [verdict, found[0] == found[1]]
    return same

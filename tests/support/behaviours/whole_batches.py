"""Evaluates models with values of which nothing tells how they depend on the rows."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support.behaviours.common import X, here
from tfmulti import prepare
from tfmulti.data.arrays import ArraySource
from tfmulti.distribution.strategies import placement_of

# The last of five batches has one row, so some replicas have none.
DATA = {"x": X[:61], "batch_size": 15, "verbose": 0}
TARGETS = (X[:61, :3] > 0).astype(np.float32)


def by_python(function: Callable[[np.ndarray], Any], x: Any, shape: Any = None) -> tf.Tensor:
    """Returns what NumPy computes from a tensor, outside of the graph."""
    if tf.executing_eagerly():
        return tf.convert_to_tensor(np.asarray(function(np.asarray(x)), np.float32))
    found = tf.numpy_function(lambda a: np.asarray(function(a), np.float32), [x], tf.float32)
    return tf.ensure_shape(found, x.shape if shape is None else shape)


class Ranks(keras.layers.Layer):
    """Replaces each number by its rank among all rows of the batch."""

    def call(self, x: Any) -> tf.Tensor:
        return by_python(lambda a: a.argsort(0).argsort(0) / 10.0, x)


class Logged(keras.layers.Layer):
    """A layer that hands its values to a Python function."""

    def call(self, x: Any) -> Any:
        return by_python(lambda values: values, x)


@tf.custom_gradient  # type: ignore[untyped-decorator]
def passed_on(x: Any) -> Any:
    return tf.identity(x), lambda upstream: upstream


class Moving(keras.metrics.Metric):
    """A moving sum of medians. Its state is no sum over rows, and does not begin with 0."""

    def __init__(self, name: str = "moving") -> None:
        super().__init__(name=name)
        self.found = self.add_variable((), "ones", name="found")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.found.assign(self.found * 0.5 + by_python(np.median, y_pred, ()))

    def result(self) -> Any:
        return self.found.value


class Evaluated(keras.Model):
    """A model whose `test_step` and `predict_step` use a value named by `case`."""

    case = ""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.memory = self.add_weight(shape=(), initializer="ones", trainable=False, name="memory")
        self.bank = tf.Variable([1.0, 2.0, 3.0], trainable=False)
        self.tracker = keras.metrics.Mean(name="tracker")

    def _value(self, x: Any, outputs: Any) -> Any:
        """Returns a number that depends on all rows of the batch."""
        ratio = tf.reduce_sum(outputs * x[:, :3]) / tf.reduce_sum(tf.square(x))
        if self.case == "custom gradient":
            return passed_on(ratio)
        if self.case == "condition":
            return tf.cond(ratio > 0, lambda: ratio + self.memory, lambda: ratio - self.memory)
        if self.case == "loop":
            return tf.while_loop(
                lambda i, total: i < 3,
                lambda i, total: (i + 1, total * self.memory + ratio),
                (0, ratio),
            )[1]
        if self.case == "state":
            self.memory.assign(self.memory * 0.5 + by_python(np.median, outputs, ()))
            return self.memory + 0.0
        if self.case.startswith("entries"):
            return self._change_entries(ratio)
        if self.case.startswith("update"):
            self._update(tf.shape(x)[0], ratio)
            return self.memory + self.tracker.result()
        if self.case == "random numbers":
            noise = keras.random.normal(tf.shape(x)[:1]) + keras.random.uniform(tf.shape(x)[:1])
            return by_python(lambda a: a.max() - np.median(a), noise, ())
        if self.case == "shuffled":
            sizes = keras.random.shuffle(keras.random.gamma(tf.shape(x)[:1], x[:, 0] ** 2 + 1.0))
            return by_python(lambda a: a[0], sizes, ())
        if self.case == "metric":
            return self.get_metrics_result()["moving"] * 2.0
        return ratio if self.case == "ratio" else by_python(np.median, outputs, ())

    def _update(self, count: Any, ratio: Any) -> None:
        """Changes variables inside a condition or a loop."""

        def update() -> Any:
            self.tracker.update_state(ratio, count)
            return self.memory.assign(self.memory * 0.5 + ratio)

        def once_more(i: Any) -> list[Any]:
            update()
            return [i + 1]

        if self.case == "update in a condition":
            tf.cond(ratio > 0, update, lambda: self.memory.assign(ratio))
        if self.case == "update by the number of rows":
            tf.cond(count > 9, update, lambda: self.memory.assign(ratio))
        if self.case == "update in a loop":
            tf.while_loop(lambda i: i < count, once_more, [0])

    def _change_entries(self, ratio: Any) -> Any:
        """Changes some entries of a variable, and returns the sum of all."""
        rows = tf.IndexedSlices(ratio[None], [1])
        if self.case == "entries by rows":
            self.bank.scatter_update(rows)
        if self.case == "entries by indices":
            self.bank.scatter_nd_add([[1]], ratio[None])
        if self.case == "entries by a slice":
            self.bank[1:].assign(tf.stack([ratio, -ratio]))
        if self.case == "entries in a condition":
            tf.cond(ratio > 0, lambda: self.bank[1].assign(ratio) + 0.0, lambda: self.bank + 0.0)
        if self.case == "entries by a factor":
            self.bank.scatter_mul(rows)
        if self.case == "entries by a handle":
            tf.raw_ops.AssignAddVariableOp(
                resource=self.bank.handle, value=tf.stack([ratio, ratio, -ratio])
            )
        return tf.reduce_sum(self.bank)

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        outputs = self(x)
        self.compute_metrics(x, y, outputs)
        return self.get_metrics_result() | {"value": self._value(x, outputs)}

    def predict_step(self, data: Any) -> Any:
        outputs = self(data)
        return {"rows": outputs * self._value(data, outputs), "first": outputs[:1]}


CASES = [
    "custom gradient",
    "condition",
    "loop",
    "state",
    "update in a condition",
    "update by the number of rows",
    "update in a loop",
    "entries by rows",
    "entries by indices",
    "entries by a slice",
    "entries in a condition",
    "entries by a factor",
    "entries by a handle",
    "random numbers",
    "shuffled",
    "python",
    "metric",
]


def _model(case: str, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        inputs = keras.Input((6,))
        outputs = keras.layers.Dense(3, "sigmoid")(inputs)
        model = Evaluated(inputs=inputs, outputs=outputs)
        model.case = case
        metrics = [keras.metrics.AUC(), *([Moving()] if case == "metric" else [])]
        model.compile("sgd", "mse", metrics=metrics, **options)
    return prepare(model)


def _numbers(model: keras.Model, x: Any = DATA["x"]) -> Any:
    """Returns the numbers of two calls of `evaluate` and `predict`, and the state afterwards."""
    found, data = [], {**DATA, "x": x}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            found.append(model.evaluate(**data, y=TARGETS, return_dict=True))
            found.append(model.predict(**data))
    found.append([np.asarray(v) for v in model.variables if "seed" not in v.path])
    return [np.asarray(value).tolist() for value in keras.tree.flatten(found)]


def evaluated_by_whole_batches(case: str) -> Any:
    return _numbers(_model(case))


def evaluated_in_eager_mode() -> Any:
    return _numbers(_model("ratio", run_eagerly=True))


def predicted_in_eager_mode() -> Any:
    """Returns the predictions of a functional model with an operation that mixes the rows."""
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        inputs = keras.Input((6,))
        hidden = inputs - keras.ops.mean(inputs, axis=0, keepdims=True)
        model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
        model.compile("sgd", "mse", run_eagerly=True)
    prepare(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.predict(**DATA).tolist()


def evaluated_by_several_steps_at_once() -> Any:
    return _numbers(_model("python", steps_per_execution=3))


class Damaged(ArraySource):
    """Examples of which number 3 and all of the second batch cannot be read."""

    def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
        if {3, *range(15, 30)} & set(indices.tolist()):
            raise OSError(5, "Input/output error")
        super().read_into(indices, epoch, out)


def evaluated_without_bad_examples() -> Any:
    """Returns the logs of an evaluation of damaged examples."""
    model = prepare(_model("python"), skip_bad_records=20)
    examples = Damaged((X[:61], TARGETS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = model.evaluate(examples, batch_size=15, verbose=0, return_dict=True)
    return list(found.values())


def evaluated_with_a_layer() -> Any:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        inputs = keras.Input((6,))
        outputs = keras.layers.Dense(3, "sigmoid")(Ranks()(inputs))
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse", metrics=[keras.metrics.AUC(), "accuracy"])
    return _numbers(prepare(model))


def _spectrograms(x: Any) -> Any:
    """Returns spectrograms that are relative to the loudest of all rows."""
    return keras.layers.MelSpectrogram(
        fft_length=4,
        sequence_stride=2,
        num_mel_bins=2,
        sampling_rate=100,
        min_freq=1.0,
        top_db=5.0,
    )(x)


# Layers of Keras that compute along the axis of the rows.
ALONG_ROWS: dict[str, Callable[[Any], Any]] = {
    "spectrograms": _spectrograms,
    "softmax": lambda x: keras.layers.Reshape((1,))(
        keras.layers.Activation("softmax")(keras.ops.max(x, -1))
    ),
    "attention": lambda x: keras.layers.Attention()([x, x]),
    "additive attention": lambda x: keras.layers.AdditiveAttention()([x, x]),
}


def evaluated_along_rows(case: str) -> Any:
    """Returns the numbers of a model with one of the layers `ALONG_ROWS`."""
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        inputs = keras.Input((6,))
        features = keras.layers.Flatten()(ALONG_ROWS[case](inputs))
        model = keras.Model(inputs, keras.layers.Dense(3)(features))
        model.compile("sgd", "mse")
    return _numbers(prepare(model))


def evaluated_texts() -> Any:
    """Returns the numbers of a model that gives each text as many tokens as the longest one has."""
    keras.utils.set_random_seed(1)
    texts = tf.constant([" ".join("ab"[: 1 + i % 2] * (i % 5 + 1)) for i in range(61)])
    with here.strategy.scope():
        inputs = keras.Input((), dtype="string")
        tokens = keras.layers.TextVectorization(vocabulary=["a", "b"])(inputs)
        features = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(4, 3)(tokens))
        model = keras.Model(inputs, features)
        model.compile("sgd", "mse")
    return _numbers(prepare(model), texts)


class Remembers(keras.layers.Layer):
    """Keeps the mean of its inputs in a variable that Keras does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.last = tf.Variable(0.0, trainable=False)

    def call(self, x: Any) -> Any:
        self.last.assign(tf.reduce_mean(x))
        return x


def remembered_in_predictions() -> Any:
    """Returns what a layer has kept of the last batch, of which each replica has other rows."""
    with here.strategy.scope():
        layer = Remembers()
        model = keras.Sequential([keras.Input((6,)), layer])
        model.compile("sgd", "mse")
    prepare(model).predict(**DATA | {"x": X[:60]})
    copies = here.strategy.experimental_local_results(layer.last)
    return sorted({float(copy) for copy in copies})


def validated_while_it_trains() -> Any:
    """Returns the history of a `fit` with validation, whose test_step alone is not understood."""
    model = _model("python")
    options = {"validation_data": (X[:61], TARGETS), "validation_batch_size": 15, "epochs": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = model.fit(**DATA, y=TARGETS, shuffle=False, **options)
    return [value for _, values in sorted(fitted.history.items()) for value in values]


class OfParts(keras.Model):
    """Evaluates and predicts batches of ragged and sparse tensors or texts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def _lengths(self, data: Any) -> Any:
        if isinstance(data, tf.RaggedTensor):
            return tf.reduce_sum(data, axis=list(range(1, data.shape.rank)))
        if isinstance(data, tf.SparseTensor):
            return tf.sparse.reduce_sum(data, 1)
        return tf.cast(tf.strings.length(data), tf.float32)

    def test_step(self, data: Any) -> dict[str, Any]:
        lengths = self._lengths(data) * self.scale
        return {"value": by_python(np.median, lengths, ())}

    def predict_step(self, data: Any) -> Any:
        lengths = self._lengths(data) * self.scale
        return {"rank": by_python(lambda a: a.argsort().argsort(), lengths, [None])}


def _data_of(kind: str) -> Any:
    rng = np.random.default_rng(3)
    counts = rng.integers(1, 5, 31)
    values = rng.random(int(counts.sum())).astype(np.float32)
    ragged = tf.RaggedTensor.from_row_lengths(values, counts)
    if kind == "ragged":
        return ragged
    if kind == "ragged twice":
        return tf.RaggedTensor.from_row_lengths(ragged, [3] * 10 + [1])
    if kind == "sparse":
        return ragged.to_sparse()
    return tf.constant(["a" * count for count in counts * np.arange(31)])


def evaluated_parts(kind: str) -> Any:
    with here.strategy.scope():
        model = OfParts()
        model.compile("sgd")
    prepare(model)
    data = tf.data.Dataset.from_tensor_slices(_data_of(kind)).batch(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = model.evaluate(data, verbose=0, return_dict=True)["value"]
        return [value, *model.predict(data, verbose=0)["rank"].tolist()]


def evaluated_with_a_layer_of_one_worker(mode: str) -> Any:
    """Returns the numbers of a model of which one worker alone has a layer that changes nothing."""
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        inputs = keras.Input((6,))
        has_layer = placement_of(here.strategy).rank == 1
        hidden = Logged()(inputs) if has_layer else inputs
        model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
        model.compile("sgd", "mse", run_eagerly=mode == "eager")
    return _numbers(prepare(model))


def computed_from_batches_of_any_size(case: str) -> Any:
    """Returns the numbers of batches whose rows differ between the workers, too."""
    model = _model(case)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in (16, 15, 20, 16, 1, 2, 33):
            found.append(model.test_on_batch(X[:rows], TARGETS[:rows], return_dict=True))
            found.append(model.predict_on_batch(X[:rows]))
    return [np.asarray(value).tolist() for value in keras.tree.flatten(found)]


class OfTypes(keras.Model):
    """A model that ranks the rows of floats only."""

    def predict_step(self, data: Any) -> Any:
        return Ranks()(data) if data.dtype.is_floating else data * 2


def predicted_for_two_types() -> Any:
    with here.strategy.scope():
        model = OfTypes()
        model.compile("sgd", "mse")
    prepare(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [model.predict_on_batch(x).tolist() for x in (np.arange(8), X[:8])]


def warnings_of_whole_batches(verify: str) -> Any:
    """Returns the warnings of two calls of `evaluate` and `predict`."""
    model = prepare(_model("python"), verify=False if verify == "off" else None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.evaluate(**DATA, y=TARGETS)
            model.predict(**DATA)
    return [str(w.message) for w in caught if " batch" in str(w.message)]


def drawn_after_an_evaluation() -> Any:
    """Returns what Python, NumPy and Keras draw after an evaluation that is traced twice."""
    model = _model("python")
    keras.utils.set_random_seed(7)
    _numbers(model)
    return [random.random(), float(np.random.random()), float(keras.random.uniform(()))]

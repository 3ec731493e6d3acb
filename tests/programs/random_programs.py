"""Makes programs of random parts, to find differences that nobody has thought of.

A program follows from its seed alone. It has random data, layers, losses, metrics and options, and
often code of its own: a layer, a loss or a `train_step` whose values are random expressions of the
rows. Its numbers are float64, in which rounding is far smaller than an error, unless another type
is asked for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from keras.config import floatx

from tests.programs import keras_classes
from tests.programs.registry import EQUAL, Made, Program

TOLERANCES = {"float64": 1e-10, "float32": 1e-4}
# The rest of Keras' layers does not take float64, or is slow to trace.
BLOCKS = {
    **keras_classes.PLAIN,
    **keras_classes.OF_SEQUENCES,
    **keras_classes.sized("Conv#", 3, 2, activation="tanh"),
    **keras_classes.sized("GlobalAveragePooling#"),
    **keras_classes.sized("MaxPooling#"),
}
KINDS = ("vector", "sequence", "image", "tokens")
# TensorFlow's kernel for the largest k values takes float32 alone.
METRICS = {name: found for name, found in keras_classes.METRICS.items() if "TopK" not in name}

Rows = Any
Number = Any


def _centered(x: Rows) -> Rows:
    return x - tf.reduce_mean(x, 0, keepdims=True)


def _attended(x: Rows) -> Rows:
    return tf.matmul(tf.nn.softmax(tf.matmul(x, x, transpose_b=True)), x)


def _by_first(x: Rows) -> Rows:
    return tf.gather(x, tf.argsort(x[:, 0], stable=True))


def _mapped(x: Rows) -> Rows:
    return tf.vectorized_map(lambda row: row * tf.reduce_sum(row), x)


def _looped(x: Rows) -> Rows:
    def body(i: Any, rows: Rows) -> tuple[Any, Rows]:
        return i + 1, rows - 0.2 * tf.reduce_mean(rows, 0, keepdims=True)

    return tf.while_loop(lambda i, rows: i < 3, body, (0, x))[1]


_halving = tf.custom_gradient(lambda x: (tf.square(x), lambda gradient: gradient * x * 0.5))
_centering = tf.custom_gradient(lambda x: (x + 0.1, _centered))
_computed_again = tf.recompute_grad(lambda x: tf.tanh(x) * x)
_compiled = tf.function(lambda x: x * tf.reduce_mean(tf.abs(x), 0))


def _by_halves(x: Rows) -> Rows:
    half = tf.shape(x)[0] // 2
    return tf.concat([x[half:], x[:half] * 0.5], 0)


def _scattered(x: Rows) -> Rows:
    rows = tf.shape(x)[0]
    return tf.tensor_scatter_nd_add(x, (tf.range(rows)[:, None] * 3) % rows, x * 0.3)


def _spectrum(x: Rows) -> Rows:
    values = tf.signal.fft(tf.cast(tf.transpose(x), "complex128"))
    return tf.cast(tf.transpose(tf.math.real(values)), x.dtype) / 5


def _in_windows(x: Rows) -> Rows:
    return tf.reduce_mean(tf.signal.frame(tf.pad(x, [[1, 1], [0, 0]]), 3, 1, axis=0), 1)


def _by_segments(x: Rows) -> Rows:
    segments = tf.cast(x[:, 0] > tf.reduce_mean(x[:, 0]), "int32")
    return x + tf.gather(tf.math.unsorted_segment_mean(x, segments, 2), segments)


def _scanned(x: Rows) -> Rows:
    return ops.scan(lambda kept, row: (0.5 * kept + row, kept + row), x[0] * 0.0, x)[1]


# Each takes rows, and returns rows.
OF_ROWS: dict[str, Callable[[Rows], Rows]] = {
    "square": tf.square,
    "tanh": tf.tanh,
    "relu": tf.nn.relu,
    "unit": lambda x: tf.math.l2_normalize(x, -1, epsilon=1e-3),
    "centered": _centered,
    "standard": lambda x: _centered(x) / (tf.math.reduce_std(x, 0) + 0.1),
    "keras standard": lambda x: (x - ops.mean(x, 0)) / ops.sqrt(ops.var(x, 0) + 0.1),
    "softmax of the batch": lambda x: tf.nn.softmax(x, 0),
    "sums so far": lambda x: tf.cumsum(x, 0) / 10,
    "reversed": lambda x: x[::-1] * 0.5 + x,
    "rolled": lambda x: tf.roll(x, 1, 0) * x,
    "sorted": lambda x: ops.sort(x, 0) + x,
    "attended": _attended,
    "by the first column": _by_first,
    "mapped": _mapped,
    "scaled by the largest": lambda x: x / (1 + tf.reduce_max(tf.abs(x))),
    "scaled by the sum": lambda x: x / (1 + tf.reduce_sum(tf.abs(x), 0)),
    "positive": lambda x: tf.where(x > 0, x, 0.1 * x),
    "above the mean": lambda x: tf.where(x > tf.reduce_mean(x), x, tf.zeros_like(x)),
    "numbered": lambda x: x * tf.cast(tf.range(tf.shape(x)[0])[:, None] + 1, x.dtype) / 10,
    "without a gradient": lambda x: x * tf.stop_gradient(tf.reduce_mean(x)),
    "from the first": lambda x: x - x[:1],
    "flat": lambda x: tf.reshape(tf.reshape(x, [-1]), tf.shape(x)),
    "clipped": lambda x: tf.clip_by_value(x, -0.5, 0.5),
    "in a condition": lambda x: tf.cond(
        tf.reduce_mean(x) > 0, lambda: x * (1 + tf.reduce_mean(x)), lambda: x * 0.5
    ),
    "in a loop": _looped,
    "in a loop of Keras": lambda x: ops.fori_loop(0, 3, lambda i, rows: rows * 0.9 + x * 0.1, x),
    "scanned": _scanned,
    "row by row": lambda x: tf.map_fn(lambda row: row / (1 + tf.norm(row)), x),
    "with its own gradient": _halving,
    "with a centered gradient": _centering,
    "computed again": _computed_again,
    "compiled": _compiled,
    "by halves": _by_halves,
    "scattered": _scattered,
    "spectrum": _spectrum,
    "in windows": _in_windows,
    "by segments": _by_segments,
    "taken by number": lambda x: ops.take(x, ops.argsort(ops.sum(x, 1)), 0) + x,
    "by covariance": lambda x: ops.einsum("bi,ci,cj->bj", x, x, x) / 10,
    "rank": lambda x: x * tf.cast(tf.argsort(tf.argsort(x, 0), 0), x.dtype) / 10,
    "weighted by closeness": lambda x: ops.matmul(
        ops.softmax(-ops.sum((x[:, None] - x[None]) ** 2, -1)), x
    ),
}
# Each takes rows, and returns one number.
OF_ALL: dict[str, Callable[[Rows], Number]] = {
    "mean": tf.reduce_mean,
    "sum": lambda x: tf.reduce_sum(x) / 10,
    "keras mean": ops.mean,
    "mean of sums": lambda x: tf.reduce_mean(tf.reduce_sum(x, -1)),
    "largest": tf.reduce_max,
    "log of sums": lambda x: tf.reduce_logsumexp(x) / 5,
    "norm": lambda x: tf.norm(x + 0.1) / 5,
    "variance": lambda x: tf.math.reduce_variance(x),
    "largest of means": lambda x: tf.reduce_max(tf.reduce_mean(x, 0)),
    "mean of the largest": lambda x: tf.reduce_mean(tf.sort(x[:, 0])[-2:]),
    "sum by the rows": lambda x: tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], x.dtype),
    "first": lambda x: x[0, 0],
    "mean of the positive": lambda x: tf.math.divide_no_nan(
        tf.reduce_sum(tf.nn.relu(x)), tf.reduce_sum(tf.cast(x > 0, x.dtype))
    ),
    "mean of a selection": lambda x: tf.reduce_mean(
        tf.concat([tf.boolean_mask(x, x[:, 0] > 0), x[:1]], 0)
    ),
    "products": lambda x: tf.reduce_mean(tf.square(tf.matmul(x, x, transpose_a=True))) / 10,
    "pairs": lambda x: tf.reduce_mean(tf.square(x[:, None] - x[None])),
    "in segments": lambda x: (
        tf.reduce_mean(tf.square(tf.math.unsorted_segment_sum(x, tf.cast(x[:, 0] > 0, "int32"), 2)))
        / 10
    ),
    "loop": lambda x: (
        tf.foldl(lambda total, row: 0.9 * total + tf.reduce_sum(row), x, x[0, 0]) / 10
    ),
    "entropy": lambda x: -tf.reduce_mean(tf.nn.softmax(x) * tf.nn.log_softmax(x)),
    "median": lambda x: ops.mean(ops.median(x, 0)),
    "quantile": lambda x: ops.quantile(x[:, 0], 0.3),
    "determinant": lambda x: (
        tf.linalg.logdet(tf.matmul(x, x, transpose_a=True) + tf.eye(x.shape[-1], dtype=x.dtype)) / 5
    ),
    "last": lambda x: x[-1, -1],
    "until it is small": lambda x: tf.while_loop(
        lambda v: v > 0.1, lambda v: (v * 0.7,), (tf.reduce_mean(tf.square(x)),)
    )[0],
    "in a condition": lambda x: tf.cond(
        tf.reduce_max(x) > 0.5, lambda: tf.reduce_sum(x) / 10, lambda: tf.reduce_mean(x)
    ),
    "neighbours": lambda x: tf.reduce_mean(tf.square(x[1:] - x[:-1])),
    "mean of half": lambda x: tf.reduce_mean(x[: (tf.shape(x)[0] + 1) // 2]),
    "row by row": lambda x: tf.reduce_mean(tf.map_fn(tf.reduce_max, x)),
    "even rows": lambda x: tf.reduce_sum(x[::2]) / 10,
}
# Each draws a number for each element of rows.
NOISES: dict[str, Callable[[Any, Any], Rows]] = {
    "normal": lambda shape, seed: keras.random.normal(shape, dtype=floatx(), seed=seed),
    "uniform": lambda shape, seed: keras.random.uniform(shape, dtype=floatx(), seed=seed),
    "truncated": lambda shape, seed: keras.random.truncated_normal(
        shape, dtype=floatx(), seed=seed
    ),
    "whole": lambda shape, seed: ops.cast(keras.random.randint(shape, 0, 3, seed=seed), floatx()),
    "gamma": lambda shape, seed: keras.random.gamma(shape, 2.0, dtype=floatx(), seed=seed),
    "binomial": lambda shape, seed: keras.random.binomial(
        shape, 3.0, 0.5, dtype=floatx(), seed=seed
    ),
    "one of each row": lambda shape, seed: keras.random.uniform(
        (shape[0], 1), dtype=floatx(), seed=seed
    ),
    "one of the batch": lambda shape, seed: keras.random.uniform((1, 1), dtype=floatx(), seed=seed),
    "choice": lambda shape, seed: ops.cast(
        keras.random.categorical(ops.zeros((shape[0], 4)), shape[1], seed=seed), floatx()
    ),
    "dropped": lambda shape, seed: keras.random.dropout(ops.ones(shape, floatx()), 0.4, seed=seed),
}
# Each takes two numbers, and returns one.
OF_TWO: dict[str, Callable[[Number, Number], Number]] = {
    "sum": lambda a, b: a + b,
    "product": lambda a, b: a * b,
    "ratio": lambda a, b: a / (1 + tf.abs(b)),
    "root": lambda a, b: tf.sqrt(1 + tf.square(a) + tf.square(b)),
    "larger": tf.maximum,
    "choice": lambda a, b: tf.where(a > b, a * b, a - b),
    "weight": lambda a, b: a * tf.stop_gradient(tf.tanh(b)),
}


def _each(change: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    return lambda gradients: [
        g if g is None else change(tf.convert_to_tensor(g)) for g in gradients
    ]


# Each takes the gradients of a step, and returns changed ones.
OF_GRADIENTS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "clipped by norm": _each(lambda g: tf.clip_by_norm(g, 0.5)),
    "clipped by value": _each(lambda g: tf.clip_by_value(g, -0.1, 0.1)),
    "clipped by all": lambda gradients: tf.clip_by_global_norm(gradients, 0.5)[0],
    "signs": _each(lambda g: tf.sign(g) * 0.1),
    "normalized": _each(lambda g: g / (tf.norm(g) + 1e-3)),
    "centralized": _each(lambda g: g - tf.reduce_mean(g, 0, keepdims=True)),
    "halved": _each(lambda g: g * 0.5),
    "squared": _each(lambda g: tf.abs(g) * g),
}


class Draw(random.Random):
    """Draws the parts of a program, and notes what it has drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.words: list[str] = []

    def of(self, table: dict[str, Any]) -> Any:
        """Returns a random value of a table, and notes its name."""
        name = self.choice(list(table))
        self.words.append(name)
        return table[name]

    def chance(self, probability: float, words: str = "") -> bool:
        """Returns True with this probability, and notes the words then."""
        is_drawn = self.random() < probability
        if is_drawn and words:
            self.words.append(words)
        return is_drawn

    def rows(self, depth: int) -> Callable[[Rows], Rows]:
        """Returns a function from rows to rows, of so many operations."""
        steps = [self.of(OF_ROWS) for _ in range(depth)]

        def through(x: Rows) -> Rows:
            for step in steps:
                x = step(x)
            return x

        return through

    def number(self) -> Callable[[Rows], Number]:
        """Returns a function from rows to one number."""
        before, reduce = self.rows(self.randrange(3)), self.of(OF_ALL)
        if not self.chance(0.4):
            return lambda x: reduce(before(x))
        other, join = self.number(), self.of(OF_TWO)
        return lambda x: join(reduce(before(x)), other(x))


class OwnLayer(layers.Layer):
    """Computes rows by a random expression, and may keep a moving average or add a loss."""

    def __init__(self, draw: Draw) -> None:
        super().__init__(dtype=floatx())
        draw.words.append("own layer:")
        self.through = draw.rows(draw.randrange(1, 3))
        self.average = draw.number() if draw.chance(0.4, "state") else None
        self.loss = draw.number() if draw.chance(0.3, "added loss") else None
        self.noise = draw.of(NOISES) if draw.chance(0.3, "noise") else None
        self.has_queue = draw.chance(0.2, "queue")
        self.seeds = keras.random.SeedGenerator(draw.randrange(99))

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.kept = self.add_weight(shape=(), initializer="ones", trainable=False)
        self.queue = self.add_weight(shape=(9, shape[-1]), initializer="ones", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        found = self.through(x * self.scale)
        if self.noise is not None and training:
            found = found * (1 + 0.1 * self.noise(ops.shape(found), self.seeds))
        if self.average is not None:
            if training:
                self.kept.assign(0.9 * self.kept + 0.1 * self.average(x))
            found = found * (1 + self.kept)
        if self.has_queue:
            found = (
                found + 0.1 * ops.softmax(ops.matmul(found, ops.transpose(self.queue))) @ self.queue
            )
            if training:
                self.queue.assign(ops.concatenate([tf.stop_gradient(x), self.queue], 0)[:9])
        if self.loss is not None:
            self.add_loss(0.1 * self.loss(found))
        return found

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


class OwnCell(layers.Layer):
    """A recurrent cell whose states are random expressions of the rows."""

    def __init__(self, draw: Draw) -> None:
        super().__init__(dtype=floatx())
        draw.words.append("own cell:")
        self.through, self.state_size, self.output_size = draw.rows(1), 4, 4
        self.given, self.kept = layers.Dense(4, dtype=floatx()), layers.Dense(4, dtype=floatx())

    def build(self, shape: Any) -> None:
        self.given.build(shape)
        self.kept.build((None, 4))

    def call(self, x: Any, states: Any, training: bool = False) -> Any:
        found = ops.tanh(self.given(x) + self.kept(self.through(states[0])))
        return found, [found]


class OwnMetric(keras.metrics.Metric):
    """Keeps the sum of a random expression of the predictions of each batch, or the largest one."""

    def __init__(self, draw: Draw) -> None:
        super().__init__(name="own", dtype=floatx())
        draw.words.append("own metric:")
        self.value = draw.number()
        self.largest = draw.chance(0.3, "largest value")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        value = self.value(tf.cast(y_pred, floatx()))
        old = tf.convert_to_tensor(self.total)
        self.total.assign(tf.maximum(old, value) if self.largest else old + value)

    def result(self) -> Any:
        return self.total * 1


def _error(y: Any, p: Any) -> Any:
    """Returns rows of the differences between predictions and targets."""
    rows = tf.shape(p)[0]
    p = tf.cast(tf.reshape(p, [rows, math.prod(p.shape[1:])]), floatx())
    return p - tf.reduce_mean(tf.cast(tf.reshape(y, [rows, -1]), floatx()), 1, keepdims=True)


def _first(y: Any, p: Any) -> tuple[Any, Any]:
    """Returns the targets and the predictions of the first output."""
    return (y["out_0"], p["out_0"]) if isinstance(p, dict) else (y, p)


class OwnStep(keras.Model):
    """Has a train_step whose loss and logs are random expressions of the predictions."""

    def choose(self, draw: Draw) -> None:
        draw.words.append("own step:")
        self.value = draw.number()
        self.logged = draw.number()
        self.through_keras = draw.chance(0.5, "compute_loss")
        self.change = draw.of(OF_GRADIENTS) if draw.chance(0.4, "changed gradients") else None
        self.tracked = keras.metrics.Mean("tracked", dtype=floatx())
        self.tracks_rows = draw.chance(0.5, "tracked rows")
        self.has_penalty = draw.chance(0.2, "gradient penalty")
        self.has_two_updates = draw.chance(0.2, "two updates")
        has_second = draw.chance(0.25, "second optimizer:")
        self.second_optimizer = _optimizer(draw) if has_second else None
        self.changes_sides = draw.chance(0.15, "every other step")
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int64")
        self.average = draw.number() if draw.chance(0.2, "step's state") else None
        self.kept = self.add_weight(shape=(), initializer="ones", trainable=False, dtype=floatx())
        self.tests = draw.number() if draw.chance(0.4, "own test_step") else None
        self.predicts = draw.rows(1) if draw.chance(0.2, "own predict_step") else None

    def of(self, data: Any, training: bool) -> tuple[Any, Any, Any]:
        """Returns the predictions, their errors and the loss."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        predicted = self(x, training=training)
        error = _error(*_first(y, predicted))
        loss = self.value(error)
        if self.through_keras:
            loss += self.compute_loss(x, y, predicted, weight, training=training)
        return predicted, error, loss

    def update(self, data: Any) -> tuple[Any, Any, Any]:
        x, *_ = keras.utils.unpack_x_y_sample_weight(data)
        watched = [tensor for tensor in tf.nest.flatten(x) if tensor.dtype.is_floating]
        with tf.GradientTape() as tape:
            if self.has_penalty and watched:
                with tf.GradientTape() as inner:
                    inner.watch(watched)
                    predicted, error, loss = self.of(data, training=True)
                slope = inner.gradient(loss, watched[0], unconnected_gradients="zero")
                loss += tf.reduce_mean(tf.square(slope))
            else:
                predicted, error, loss = self.of(data, training=True)
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.change is not None:
            gradients = self.change(gradients)
        if self.changes_sides:
            side = tf.cast(self.count % 2, floatx())
            gradients = [g if g is None else side * g for g in gradients]
            self.count.assign_add(1)
        pairs = list(zip(gradients, self.trainable_variables, strict=True))
        if self.second_optimizer is None:
            self.optimizer.apply_gradients(pairs)
        else:
            self.second_optimizer.apply_gradients(pairs[:2])
            self.optimizer.apply_gradients(pairs[2:])
        return predicted, error, loss

    def train_step(self, data: Any) -> Any:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        predicted, error, loss = self.update(data)
        if self.has_two_updates:
            predicted, error, loss = self.update(data)
        if self.average is not None:
            self.kept.assign(0.9 * self.kept + 0.1 * self.average(error))
        self.tracked.update_state(tf.square(error) if self.tracks_rows else loss)
        logs = self.compute_metrics(x, y, predicted, weight)
        return {**logs, "logged": self.logged(error), "tracked": self.tracked.result()}

    def test_step(self, data: Any) -> Any:
        if self.tests is None:
            return super().test_step(data)
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        predicted, error, loss = self.of(data, training=False)
        self.tracked.update_state(loss)
        logs = self.compute_metrics(x, y, predicted, weight)
        return {**logs, "tested": self.tests(error), "tracked": self.tracked.result()}

    def predict_step(self, data: Any) -> Any:
        found = super().predict_step(data)
        if self.predicts is None or isinstance(found, dict):
            return found
        rows = tf.shape(found)[0]
        flat = tf.reshape(found, [rows, math.prod(found.shape[1:])])
        return {"found": found, "own": self.predicts(flat)}

    @property
    def metrics(self) -> list[Any]:
        return [*super().metrics, self.tracked]


class OwnModel(keras.Model):
    """Calls a model, and adds a layer that the first batch builds and a random loss."""

    def __init__(self, draw: Draw, inner: keras.Model) -> None:
        super().__init__(dtype=floatx())
        draw.words.append("own model:")
        self.inner, self.loss_of_outputs = inner, draw.number()
        self.before = layers.Dense(4, "tanh", dtype=floatx())

    def call(self, x: Any, training: bool = False) -> Any:
        found = self.inner(x, training=training)
        flat = [layers.Flatten()(output) for output in tf.nest.flatten(found)]
        hidden = self.before(ops.concatenate(flat, -1))
        self.add_loss(0.1 * self.loss_of_outputs(hidden))
        return found


def _block(draw: Draw, x: Any, kind: str) -> Any:
    """Returns the output of a random layer of Keras for one kind of input."""
    name = draw.choice([name for name, (given, _) in BLOCKS.items() if given == kind])
    draw.words.append(name)
    layer = BLOCKS[name][1]()
    return ops.cast(layer(x), floatx())


def _features(draw: Draw, given: Any, kind: str) -> Any:
    """Returns rows of numbers that a random branch computes from an input."""
    x = given
    if kind != "tokens" and draw.chance(0.7):
        x = layers.Dense(x.shape[-1], kernel_regularizer=draw.choice([None, None, "l2"]))(x)
    if kind == "sequence" and draw.chance(0.2):
        x = layers.RNN(OwnCell(draw), dtype=floatx())(x)
    x = layers.Flatten()(_block(draw, x, "vector" if len(x.shape) == 2 else kind))
    of_outputs: Any = draw.choice([None, None, None, "l2"])
    if draw.chance(0.1, "own activity regularizer:"):
        of_outputs = draw.number()
    of_weights = draw.number() if draw.chance(0.1, "own regularizer:") else None
    x = layers.Dense(6, "tanh", kernel_regularizer=of_weights, activity_regularizer=of_outputs)(x)
    for _ in range(draw.randrange(3)):
        if draw.chance(0.25):
            own = OwnLayer(draw)
            x = own(x)
            x = own(layers.Dense(6)(x)) if x.shape[-1] == 6 and draw.chance(0.2, "shared") else x
        else:
            x = layers.Flatten()(_block(draw, x, "vector"))
        x = layers.Dense(6)(x)
    return x


def _optimizer(draw: Draw) -> keras.optimizers.Optimizer:
    name = draw.choice([name for name in keras_classes.OPTIMIZERS if name != "ScheduleFreeAdamW"])
    draw.words.append(name)
    options: dict[str, Any] = {}
    if draw.chance(0.3):
        clip = draw.choice(["clipnorm", "global_clipnorm", "clipvalue"])
        options[clip] = draw.choice([0.1, 1.0])
    if draw.chance(0.15, "averages"):
        options |= {"use_ema": True, "ema_overwrite_frequency": draw.choice([None, 2])}
    if draw.chance(0.15, "accumulates"):
        options["gradient_accumulation_steps"] = 2
    if draw.chance(0.2, "decays") and name != "Ftrl":
        options["weight_decay"] = 0.01
    rate: Any = 0.01
    if draw.chance(0.3, "schedule"):
        rate = keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.7)
    draw.words.extend(map(str, options))
    if draw.chance(0.1):
        return OwnOptimizer(draw, rate, **options)
    return getattr(keras.optimizers, name)(rate, **options)


def _targets(draw: Draw, rows: int, kind: str) -> np.ndarray:
    numbers = np.random.default_rng(draw.randrange(99))
    if kind == "steps":
        return numbers.integers(0, 3, (rows, 6)).astype("int32")
    classes = numbers.integers(0, 3, rows)
    if kind == "classes":
        return classes.astype("int32").reshape(draw.choice([(rows,), (rows, 1)]))
    if kind == "one-hot":
        return np.eye(3, dtype=floatx())[classes]
    return (classes > 0).astype(floatx())[:, None]


def _of_kind(draw: Draw, table: dict[str, Any], kind: str) -> Any:
    of_steps = kind == "steps"
    kind = "classes" if of_steps else kind
    # The Circle loss takes one class for each row.
    names = [name for name, (given, _) in table.items() if given == kind]
    name = draw.choice([name for name in names if not (of_steps and name == "Circle")])
    draw.words.append(name)
    return table[name][1]()


def _loss(draw: Draw, kind: str) -> Any:
    if draw.chance(0.25, "own loss:"):
        if draw.chance(0.4, "of each row"):
            rows = draw.rows(draw.randrange(1, 3))
            return lambda y, p: tf.reduce_mean(tf.square(rows(_error(y, p))), -1)
        value = draw.number()
        return lambda y, p: value(_error(y, p))
    loss = _of_kind(draw, keras_classes.LOSSES, kind)
    if draw.chance(0.3):
        loss.reduction = draw.choice(["sum", "mean_with_sample_weight", "mean"])
        draw.words.append(loss.reduction)
    return loss


def _own_function(draw: Draw) -> Any:
    """Returns a metric function of one number, or of one for each row."""
    number, rows = draw.number(), draw.rows(1)
    has_rows = draw.chance(0.5, "of each row")

    def own_function(y: Any, p: Any) -> Any:
        error = _error(y, p)
        return tf.reduce_mean(rows(error), -1) if has_rows else number(error)

    return own_function


class OwnOptimizer(keras.optimizers.SGD):
    """Divides each gradient of a matrix by a random expression of it."""

    def __init__(self, draw: Draw, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        draw.words.append("own optimizer:")
        self.size = draw.number()

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if len(gradient.shape) == 2:
            gradient = gradient / (1 + tf.abs(self.size(tf.convert_to_tensor(gradient))))
        super().update_step(gradient, variable, learning_rate)


class Shrinking(keras.callbacks.Callback):
    """Makes the kernels of the model smaller after each batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for weight in self.model.trainable_variables:
            weight.assign(weight * 0.99)


class Slowing(keras.callbacks.Callback):
    """Makes the learning rate smaller before each batch."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.01 / (batch + 1)


def _callbacks(draw: Draw) -> list[keras.callbacks.Callback]:
    found: list[keras.callbacks.Callback] = []
    if draw.chance(0.08, "Shrinking"):
        found.append(Shrinking())
    if "schedule" not in draw.words and draw.chance(0.08, "Slowing"):
        found.append(Slowing())
    if "schedule" not in draw.words and draw.chance(0.1, "LearningRateScheduler"):
        found.append(keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.01 / (epoch + 1)))
    if draw.chance(0.1, "EarlyStopping"):
        found.append(keras.callbacks.EarlyStopping("loss", restore_best_weights=True, patience=1))
    return found


def _data(
    draw: Draw, kinds: dict[str, str], targets: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments of `fit`, and those of `evaluate`."""
    rows, batch = draw.randrange(18, 40), draw.choice([5, 7, 8, 12, 16])
    numbers = np.random.default_rng(draw.randrange(99))
    x: Any = {
        name: numbers.integers(0, 9, (rows, 6)).astype("int32")
        if kind == "tokens"
        else numbers.standard_normal((rows, *keras_classes.SHAPES[kind])).astype(floatx())
        for name, kind in kinds.items()
    }
    y: Any = {f"out_{i}": _targets(draw, rows, kind) for i, kind in enumerate(targets)}
    has_one = len(targets) == 1
    y = y["out_0"] if has_one else y
    weights: Any = None
    if draw.chance(0.3, "weights"):
        of_steps = targets == ["steps"] and draw.chance(0.5, "of steps")
        weights = (numbers.random((rows, 6) if of_steps else rows) + 0.1).astype(floatx())
        if not has_one:
            weights = {name: weights for name in y}
    given: dict[str, Any] = {"epochs": draw.choice([2, 2, 3])}
    form = draw.choice(["arrays", "arrays", "dataset", "shuffled"])
    draw.words.append(f"{form} of {rows} by {batch}")
    if form == "dataset":
        parts = (x, y) if weights is None else (x, y, weights)
        data = tf.data.Dataset.from_tensor_slices(parts).batch(batch)
        if draw.chance(0.4, "steps_per_epoch"):
            data, given["steps_per_epoch"] = data.repeat(), draw.choice([2, 3])
        given["x"] = data
    else:
        given |= {"x": x, "y": y, "batch_size": batch, "shuffle": form == "shuffled"}
        if weights is not None:
            given["sample_weight"] = weights
        elif targets == ["classes"] and draw.chance(0.2, "class_weight"):
            given["class_weight"] = {0: 0.5, 1: 1.0, 2: 2.0}
        if draw.chance(0.2, "validation_split"):
            given["validation_split"] = 0.3
    if "validation_split" not in given and draw.chance(0.3, "validation_data"):
        given["validation_data"] = (x, y)
        given["validation_batch_size"] = batch + 1
    return given, {"x": x, "y": y, "batch_size": batch + 2}


def _steps_of_tokens(draw: Draw, tokens: Any) -> Any:
    """Returns a vector for each step of masked tokens."""
    draw.words.append("masked steps")
    x = layers.Embedding(9, 4, mask_zero=draw.chance(0.7, "mask"))(tokens)
    for _ in range(draw.choice([1, 2])):
        name = draw.choice(["LSTM", "GRU", "SimpleRNN", "attention", "dense", "normalization"])
        draw.words.append(name)
        if name == "attention":
            x = layers.MultiHeadAttention(2, 2)(x, x, use_causal_mask=draw.chance(0.5))
        elif name == "normalization":
            kind = draw.choice([layers.BatchNormalization, layers.LayerNormalization])
            x = kind()(x)
        elif name == "dense":
            x = layers.TimeDistributed(layers.Dense(4, "tanh"))(x)
        else:
            x = getattr(layers, name)(4, return_sequences=True)(x)
    return x


def _arguments_of_compile(draw: Draw, targets: list[str]) -> dict[str, Any]:
    """Returns the arguments of `compile`."""
    losses = [_loss(draw, target) for target in targets]
    metrics = [
        [_of_kind(draw, METRICS, target) for _ in range(draw.randrange(3))] for target in targets
    ]
    if draw.chance(0.25):
        metrics[0].append(OwnMetric(draw))
    if draw.chance(0.2, "own metric function:"):
        metrics[-1].append(_own_function(draw))
    name = "weighted_metrics" if draw.chance(0.4, "weighted") else "metrics"
    compiled: dict[str, Any] = {"optimizer": _optimizer(draw)}
    if len(targets) == 1:
        compiled |= {"loss": losses[0], name: metrics[0]}
    else:
        names = [f"out_{i}" for i in range(len(targets))]
        compiled |= {
            "loss": dict(zip(names, losses, strict=True)),
            name: dict(zip(names, metrics, strict=True)),
        }
        if draw.chance(0.5, "loss_weights"):
            compiled["loss_weights"] = {"out_0": 0.3, "out_1": 2.0}
    return compiled


def made(seed: int, words: list[str] | None = None, **options: Any) -> Made:
    """Returns the program of a seed.

    Args:
        seed: the number that the program follows from.
        words: gets the names of the parts that were drawn.
        options: more arguments of `compile`.
    """
    draw = Draw(seed)
    kinds = {f"in_{i}": draw.choice(KINDS) for i in range(draw.choice([1, 1, 2]))}
    targets = draw.choices(["classes", "one-hot", "chance"], k=draw.choice([1, 1, 1, 2]))
    inputs = {
        name: keras.Input(
            keras_classes.SHAPES[kind], name=name, dtype="int32" if kind == "tokens" else floatx()
        )
        for name, kind in kinds.items()
    }
    if "tokens" in kinds.values() and draw.chance(0.5):
        targets = ["steps"]
        tokens = next(inputs[name] for name, kind in kinds.items() if kind == "tokens")
        outputs: Any = [layers.Dense(3, "softmax")(_steps_of_tokens(draw, tokens))]
    else:
        branches = [_features(draw, inputs[name], kind) for name, kind in kinds.items()]
        middle = branches[0] if len(branches) == 1 else layers.Concatenate()(branches)
        outputs = [
            layers.Dense(*((1, "sigmoid") if target == "chance" else (3, "softmax")))(middle)
            for target in targets
        ]
    outputs = outputs[0] if len(outputs) == 1 else {f"out_{i}": x for i, x in enumerate(outputs)}
    is_own = draw.chance(0.4)
    model = (OwnStep if is_own else keras.Model)(inputs, outputs)
    if draw.chance(0.1, "frozen"):
        model.layers[draw.randrange(len(model.layers))].trainable = False
    if not is_own and draw.chance(0.2):
        model = OwnModel(draw, model)
    if is_own:
        model.choose(draw)
    compiled = _arguments_of_compile(draw, targets)
    fit, evaluate = _data(draw, kinds, targets)
    fit["callbacks"] = _callbacks(draw)
    if words is not None:
        words[:] = draw.words
    predict = {"x": evaluate["x"], "batch_size": draw.choice([4, 9])}
    return Made(model, compiled | options, fit, evaluate=evaluate, predict=predict)


def program_of(
    seed: int, words: list[str] | None = None, float_type: str = "float64", **options: Any
) -> Program:
    """Returns the program of a seed, whose numbers have the given type; see `made`."""
    like, tolerance = f"random parts of {seed}", TOLERANCES[float_type]
    return Program(lambda: made(seed, words, **options), like, (), EQUAL, tolerance, float_type, ())

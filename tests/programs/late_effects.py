"""Programs whose own code has no effect in the first step, which `verify` compares.

A value that is wrong in later steps only is found by nothing but the rules for its operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.programs.common import CLASSES, SPARSE, fit, labels, rng, sgd
from tests.programs.registry import Made, program

ROWS = 25
X, Y = rng().standard_normal((ROWS, 4)), labels(ROWS)
EXACT: dict[str, Any] = {"floatx": "float64", "tolerance": 1e-10}
DATA = fit(X, Y, batch_size=8, epochs=2)
TEST = {"x": X, "y": Y, "batch_size": 7}


def variable(value: float = 0.0) -> keras.Variable:
    return keras.Variable(value, trainable=False, dtype="float64")


def entropy(y: Any, outputs: Any) -> Any:
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, outputs, True))


def _classifier(*middle: keras.layers.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((4,)), *middle, layers.Dense(CLASSES, "softmax")])


def _made(model: keras.Model, loss: Any = SPARSE, **more: Any) -> Made:
    return Made(model, {"optimizer": sgd(), "loss": loss}, DATA, evaluate=TEST, **more)


Loss = Callable[["Late", Any, Any, Any], Any]


class Late(keras.Model):
    """Takes its loss from a function, which gets 0 in the first step and then 1 as `late`."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.net = keras.Sequential([keras.Input((4,)), layers.Dense(CLASSES)])
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.seeds = keras.random.SeedGenerator(3)
        self.loss_of = loss

    def call(self, x: Any) -> Any:
        return self.net(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        late = tf.cast(self.steps > 0, "float64")
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, x, y, late)
        weights = self.net.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.steps.assign_add(1.0)
        return {"found": loss}

    def test_step(self, data: Any) -> Any:
        x, y = data
        return {"found": self.loss_of(self, x, y, tf.ones((), "float64"))}


def late_program(like: str) -> Callable[[Loss], Callable[[], Made]]:
    """Registers a program whose step and test_step have a function for their loss."""

    def register(loss: Loss) -> Callable[[], Made]:
        def make() -> Made:
            return Made(Late(loss), {"optimizer": sgd()}, DATA, evaluate=TEST)

        make.__name__, make.__doc__ = loss.__name__, loss.__doc__
        return program(like, **EXACT)(make)

    return register


class Holder:
    """An object that Keras does not know, and that holds a variable."""

    def __init__(self) -> None:
        self.kept = variable()

    def moved(self, value: Any) -> Any:
        """Makes the variable the mean of its value and of another one, and returns it."""
        self.kept.assign(0.5 * self.kept + 0.5 * value)
        return self.kept + 0.0


@program("A moving average in an object of one's own", **EXACT)
def variable_of_a_plain_object() -> Made:
    """A step and a test_step change a `keras.Variable` of an object that Keras does not know."""
    holder = Holder()

    def loss(model: Late, x: Any, y: Any, late: Any) -> Any:
        return entropy(y, model(x)) * (1 + holder.moved(late * tf.reduce_mean(x**2)))

    return Made(Late(loss), {"optimizer": sgd()}, DATA, evaluate=TEST)


@program("Class-balanced loss with counts of the classes", **EXACT)
def loss_with_a_variable_of_its_closure() -> Made:
    """A loss function of `compile` keeps an average of the targets, which its first call leaves."""
    average, calls = variable(), variable()

    def loss(y: Any, outputs: Any) -> Any:
        share = tf.reduce_mean(tf.cast(y == 1, "float64"))
        average.assign(0.9 * average + tf.cast(calls > 0, "float64") * share)
        calls.assign_add(1.0)
        return keras.losses.sparse_categorical_crossentropy(y, outputs) * (1 + average)

    return _made(_classifier(), loss)


@late_program("Learning rate by the loss of the batch")
def rate_by_the_loss(model: Late, x: Any, y: Any, late: Any) -> Any:
    """A step sets the learning rate by the loss of its batch."""
    loss, rate = entropy(y, model(x)), model.optimizer.learning_rate
    rate.assign(tf.where(late > 0, tf.cast(0.1 * loss, rate.dtype), tf.convert_to_tensor(rate)))
    return loss


class Sparsity(keras.regularizers.Regularizer):
    """Keeps a moving average of the activations."""

    def __init__(self) -> None:
        self.average, self.calls = variable(), variable()

    def __call__(self, outputs: Any) -> Any:
        share = tf.cast(self.calls > 0, "float64") * tf.reduce_mean(outputs**2)
        self.average.assign(0.5 * self.average + share)
        self.calls.assign_add(1.0)
        return self.average * tf.reduce_mean(outputs**2)


@program("Sparse autoencoder: a moving average of the activations", **EXACT)
def regularizer_with_a_state() -> Made:
    """An activity regularizer changes a variable of its own inside a layer of Keras."""
    return _made(_classifier(layers.Dense(4, activity_regularizer=Sparsity())))


@program("Activation with a running scale", **EXACT)
def activation_with_a_state() -> Made:
    """A function that a Dense layer calls as its activation changes a variable."""
    average, calls = variable(), variable()

    def scaled(outputs: Any) -> Any:
        average.assign(tf.cast(calls > 0, "float64") * tf.reduce_mean(outputs**2))
        calls.assign_add(1.0)
        return tf.tanh(outputs) * (1 + average)

    return _made(_classifier(layers.Dense(4, activation=scaled)))


@program("A metric of the module", expects="no attribute of the model", **EXACT)
def metric_outside_of_the_model() -> Made:
    """A step updates a metric that no attribute of the model holds."""
    tracker = keras.metrics.Mean()

    def loss(model: Late, x: Any, y: Any, late: Any) -> Any:
        found = entropy(y, model(x))
        tracker.update_state(found)
        return found

    return Made(Late(loss), {"optimizer": sgd()}, DATA)


@program("A step that changes slots", expects="that is not built yet", **EXACT)
def slots_before_the_first_update() -> Made:
    """A step reads the optimizer's variables, of which plain Keras has none in its first trace."""

    def loss(model: Late, x: Any, y: Any, late: Any) -> Any:
        found = entropy(y, model(x))
        for slot in model.optimizer.variables[2:]:
            slot.assign(slot / (1 + late * found))
        return found

    return Made(Late(loss), {"optimizer": sgd()}, DATA)


@late_program("Dropout of rows that are centered over the batch")
def dropout_of_centered_rows(model: Late, x: Any, y: Any, late: Any) -> Any:
    """A dropout of rows from which a maximum of the batch is subtracted."""
    rows = x - late * tf.reduce_max(x, 0)
    return entropy(y, model(keras.random.dropout(rows, 0.3, seed=model.seeds)))


class Drawing(Late):
    """Draws a number for each pair of rows in evaluations."""

    def drawn(self, x: Any) -> Any:
        rows = tf.shape(x)[0]
        return keras.random.normal((rows, rows), seed=self.seeds, dtype="float64") @ x

    def test_step(self, data: Any) -> Any:
        x, y = data
        return {"found": entropy(y, self(x + self.drawn(x)))}


@program("Draws for pairs of rows, and of a shape that is a tensor", **EXACT)
def draws_of_other_shapes() -> Made:
    """Each replica draws for all pairs of rows in an evaluation, which computes the whole batch."""
    shape = tf.constant([2, 4])

    def loss(model: Drawing, x: Any, y: Any, late: Any) -> Any:
        drawn = keras.random.normal(shape, seed=model.seeds, dtype="float64")
        return entropy(y, model(x + late * tf.reduce_mean(drawn, 0)))

    return Made(Drawing(loss), {"optimizer": sgd()}, DATA, evaluate=TEST)


class DrawingHalf(Drawing):
    """Draws for each row as many numbers as half of the batch has rows."""

    def drawn(self, x: Any) -> Any:
        rows = tf.shape(x)[0]
        found = keras.random.uniform((rows, rows // 2 + 1), seed=self.seeds, dtype="float64")
        return tf.reduce_max(found, 1, keepdims=True)


class DrawingForGaps(Drawing):
    """Draws for the differences between all rows, and drops some of them."""

    def drawn(self, x: Any) -> Any:
        gaps = x[:, :1] - x[:, 0][None]
        kept = keras.random.dropout(gaps, 0.3, seed=self.seeds)
        noise = keras.random.normal(tf.shape(gaps), seed=self.seeds, dtype="float64")
        return tf.reduce_mean(kept * noise, 1, keepdims=True)


def _without_draws(model: Late, x: Any, y: Any, late: Any) -> Any:
    return entropy(y, model(x))


@program("Draws for half of the batch", **EXACT)
def draws_by_half_of_the_rows() -> Made:
    """The size of a row's draws follows from the number of rows by other means than a product."""
    return Made(DrawingHalf(_without_draws), {"optimizer": sgd()}, DATA, evaluate=TEST)


@program("Dropout of the differences between rows", **EXACT)
def draws_for_differences_of_rows() -> Made:
    """Dropout and draws of the shape of a matrix of rows by rows, which mixed rows have."""
    return Made(DrawingForGaps(_without_draws), {"optimizer": sgd()}, DATA, evaluate=TEST)


@late_program("Mixing of rows before a network with dropout")
def dropout_of_mixed_rows(model: Late, x: Any, y: Any, late: Any) -> Any:
    """Rows that are mixed with the next one and with those in the reverse order; running sums."""
    mixed = 0.6 * x + late * (0.3 * tf.roll(x, 1, 0) + 0.1 * x[::-1] + 0.1 * tf.cumsum(x) / ROWS)
    return entropy(y, model(keras.random.dropout(mixed, 0.3, seed=model.seeds)))


class Mixing(layers.Layer):
    """Mixes each row with one of the others from the second training step on."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def part_of_others(self, training: bool) -> Any:
        """Returns 0 in the first training step, and then 0.4."""
        part = 0.4 * ops.cast(self.calls > 0, self.compute_dtype)
        if training:
            self.calls.assign_add(1.0)
        return part

    def call(self, x: Any, training: bool = False) -> Any:
        part = self.part_of_others(training)
        return (1 - part) * x + part * ops.flip(x, 0)


@program("Mixup in the model, before layers with a state", **EXACT)
def layers_after_mixed_rows() -> Made:
    """Statistics of rows that depend on other rows, and a recurrent layer and dropout behind."""
    first = layers.Dense(6, "tanh"), layers.BatchNormalization(), layers.Reshape((2, 3))
    return _made(_classifier(Mixing(), *first, layers.GRU(4), layers.Dropout(0.2)))


class Attending(Mixing):
    """Adds to each row, later, an attention over the batch, a sorted row and its neighbour."""

    def call(self, x: Any, training: bool = False) -> Any:
        part = self.part_of_others(training)
        attended = ops.softmax(ops.matmul(x, ops.transpose(x))) @ x
        in_order = tf.gather(x, tf.argsort(x[:, 0]))
        gaps = tf.reduce_sum((x[:, None] - x[None]) ** 2, -1)
        nearest = tf.gather(x, tf.math.top_k(-gaps, 1).indices[:, 0])
        return x + part * (attended + in_order - nearest)


@program("Attention over the batch in the model, before layers with a state", **EXACT)
def layers_after_attention_over_the_batch() -> Made:
    """Sorted rows, neighbours and an attention over the batch, then statistics and dropout."""
    first = layers.Dense(6, "tanh"), layers.BatchNormalization(), layers.Reshape((2, 3))
    attention = layers.MultiHeadAttention(2, 3, dropout=0.2)
    inputs = keras.Input((4,))
    hidden = Attending()(inputs)
    for layer in first:
        hidden = layer(hidden)
    hidden = layers.GRU(4)(attention(hidden, hidden))
    outputs = layers.Dense(CLASSES, "softmax")(layers.Dropout(0.2)(hidden))
    return _made(keras.Model(inputs, outputs))


@late_program("A part of the loss that no tape records")
def rows_that_no_tape_records(model: Late, x: Any, y: Any, late: Any) -> Any:
    """Values of all rows, computed inside `tape.stop_recording()`."""
    weights = model.net.trainable_variables
    with tf.GradientTape(persistent=True) as tape:
        outputs = model(x)
        with tape.stop_recording():
            other = tf.roll(outputs, 1, 0)
        loss = entropy(y, outputs) + tf.reduce_mean((outputs - other) ** 2)
    penalty = tf.linalg.global_norm(tape.gradient(loss, weights))
    return entropy(y, model(x)) * (1 + late * tf.stop_gradient(penalty))


@program("Center loss, as in TensorFlow 1", **EXACT)
def centers_changed_by_a_function() -> Made:
    """`tf.compat.v1.scatter_sub` moves the center of each row's class."""
    centers = tf.Variable(np.zeros((CLASSES, 4)), trainable=False)

    def loss(model: Late, x: Any, y: Any, late: Any) -> Any:
        apart = tf.gather(centers, y) - x
        tf.compat.v1.scatter_sub(centers, y, 0.3 * late * apart)
        return entropy(y, model(x * tf.gather(centers, y))) + 0.1 * tf.reduce_mean(apart**2)

    return Made(Late(loss), {"optimizer": sgd()}, DATA, evaluate=TEST)


@late_program("Noise with the deviation of the batch")
def noise_of_the_batch(model: Late, x: Any, y: Any, late: Any) -> Any:
    """Normal numbers whose standard deviation is that of the batch."""
    deviation = tf.math.reduce_std(x)
    noise = keras.random.normal(tf.shape(x), stddev=deviation, seed=model.seeds, dtype="float64")
    return entropy(y, model(x + late * noise))


@late_program("Penalty of the norm of the gradients")
def penalty_of_the_norm_of_gradients(model: Late, x: Any, y: Any, late: Any) -> Any:
    """`tf.linalg.global_norm` and `tf.clip_by_global_norm` of gradients inside another tape."""
    weights = model.net.trainable_variables
    with tf.GradientTape() as tape:
        loss = entropy(y, model(x))
    gradients = tape.gradient(loss, weights)
    clipped, _ = tf.clip_by_global_norm(gradients, 0.5)
    size = tf.linalg.global_norm(gradients) + tf.reduce_sum(clipped[0] ** 3)
    return loss + late * size


class Ranked(layers.Layer):
    """Adds an entry of a table for the rank of each row in the batch."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(ROWS, shape[-1]), initializer="glorot_uniform")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.calls.assign_add(1.0)
        ranks = ops.argsort(ops.argsort(x[:, 0]))
        return x + ops.cast(self.calls > 1, x.dtype) * ops.take(self.table, ranks, 0)


@program("Lookups by the rank of a row", **EXACT)
def lookups_by_ranks() -> Made:
    """A table of which all replicas look up the same entries, with Adam."""
    given = {"optimizer": keras.optimizers.Adam(0.01), "loss": SPARSE}
    return Made(_classifier(Ranked()), given, DATA)


class Looking(Late):
    """Adds entries of a table that belong to other rows, to some rows and to each row twice."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self.net.table = self.net.add_weight(shape=(5, 4), initializer="glorot_uniform")

    def looked_up(self, x: Any) -> Any:
        """Returns what to add to each row."""
        table = self.net.table
        places = tf.cast(tf.math.floormod(10 * x[:, 0], 5), "int32")
        high = tf.cast(x[:, 1] > tf.reduce_mean(x[:, 1]), "int32")
        some = tf.gather(table, tf.boolean_mask(places, x[:, 2] > 0))
        repeated = tf.gather(table, tf.repeat(places, 2))
        added = tf.gather(table, tf.roll(places, 1, 0)) + tf.gather(table, high)
        return added + repeated[1::2] + tf.reduce_sum(tf.square(some)) / ROWS


@program("Lookups of the entries of other rows", **EXACT)
def lookups_of_neighbours() -> Made:
    """Lookups by indices that depend on all rows, with Adam, which squares each of them."""

    def loss(model: Looking, x: Any, y: Any, late: Any) -> Any:
        outputs = model(x + late * model.looked_up(x))
        return tf.reduce_mean((outputs - tf.one_hot(y, CLASSES, dtype="float64")) ** 2)

    return Made(Looking(loss), {"optimizer": keras.optimizers.Adam(0.01)}, DATA)


@program("A layer whose call was replaced", **EXACT)
def replaced_call() -> Made:
    """A `call` of one's own, as an attribute of a layer of Keras."""
    dense, calls = layers.Dense(4, "tanh"), variable()
    original = dense.call

    def call(x: Any, training: bool = False) -> Any:
        calls.assign_add(1.0)
        return original(x) - tf.cast(calls > 1, "float64") * tf.reduce_mean(x)

    dense.call = call
    return _made(_classifier(dense))


class Smallest(layers.Layer):
    """Keeps the smallest number that it has seen, from a large one on."""

    def build(self, shape: Any) -> None:
        large = keras.initializers.Constant(1e9)
        self.found = self.add_weight(shape=(), initializer=large, trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.found.assign(ops.minimum(self.found, ops.min(x)))
        return x - self.found


@program("Scaling by a running minimum")
def running_minimum() -> Made:
    """A state that begins with 1e9, beside which the numbers of the batch are rounding."""
    x = X.astype("float32")
    data = fit(x, Y, batch_size=8, epochs=2)
    return Made(_classifier(Smallest()), {"optimizer": sgd(), "loss": SPARSE}, data)


@program("keras-io: Simple MNIST convnet, without an axis for the channels")
def images_without_channels() -> Made:
    """Layers of Keras that take a batch of three axes for one image."""
    images = rng().random((ROWS, 4, 3)).astype("float32")
    middle = [layers.RandomContrast(0.5, seed=1), layers.RandomFlip("vertical", seed=2)]
    parts = [keras.Input((4, 3)), *middle, layers.Flatten(), layers.Dense(CLASSES, "softmax")]
    data = fit(images, Y, batch_size=8, epochs=2)
    predict = {"x": images, "batch_size": 7}
    given = {"optimizer": sgd(), "loss": SPARSE}
    return Made(keras.Sequential(parts), given, data, predict=predict)


class Convolution(layers.Layer):
    """Adds up the rows of neighbours, for which it gets a row of the matrix of edges."""

    def build(self, shapes: Any) -> None:
        self.dense = layers.Dense(CLASSES)
        self.dense.build(shapes[0])

    def call(self, given: Any) -> Any:
        rows, edges = given
        return ops.matmul(edges, self.dense(rows))


def _convolutions(*middle: keras.layers.Layer) -> Made:
    """Returns a program with layers between two graph convolutions."""
    edges = np.eye(ROWS) * 0.5 + rng().random((ROWS, ROWS)) / ROWS
    nodes, neighbours = keras.Input((4,)), keras.Input((ROWS,))
    hidden = ops.relu(Convolution()([nodes, neighbours]))
    for layer in middle:
        hidden = layer(hidden)
    outputs = Convolution()([hidden, neighbours])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    data = fit([X, edges], Y, batch_size=ROWS, epochs=3)
    model = keras.Model([nodes, neighbours], outputs)
    predict = {"x": [X, edges], "batch_size": ROWS}
    return Made(model, {"optimizer": sgd(), "loss": loss}, data, predict=predict)


@program("Kipf and Welling: a graph convolutional network of a whole graph", **EXACT)
def graph_convolutions_with_dropout() -> Made:
    """Products of a matrix of edges with all rows, and dropouts between two of them."""
    return _convolutions(layers.Dropout(0.3, seed=1), layers.Dense(4), layers.Dropout(0.2, seed=2))


@program("Graph convolutions with batch normalization", expects="cannot take it with its own rows")
def graph_convolutions_with_normalization() -> Made:
    """Statistics of all rows of a product that no replica can compute by itself."""
    return _convolutions(layers.BatchNormalization())


class Smoothed(keras.metrics.Metric):
    """Sums the predictions of each class, from 1 on, and returns the largest part."""

    def __init__(self) -> None:
        super().__init__(name="smoothed")
        self.sums = self.add_variable((CLASSES,), "ones")

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.sums.assign_add(ops.mean(outputs, 0))

    def result(self) -> Any:
        return ops.max(self.sums / ops.sum(self.sums))

    def reset_state(self) -> None:
        self.sums.assign(ops.ones_like(self.sums))


@program("A metric with a prior count", **EXACT)
def metric_that_begins_with_ones() -> Made:
    """A metric whose `reset_state` sets numbers that are not 0."""
    given = {"optimizer": sgd(), "loss": SPARSE, "metrics": [Smoothed()]}
    return Made(_classifier(), given, DATA, evaluate=TEST)


@late_program("Phase locking: the size of a complex mean")
def phases_averaged_over_the_batch(model: Late, x: Any, y: Any, late: Any) -> Any:
    """The gradient goes through complex numbers that are averaged over the rows."""
    outputs = model(x)
    phases = tf.reduce_mean(tf.exp(tf.complex(tf.zeros_like(outputs), outputs)), 0)
    return entropy(y, outputs) * (1 + late * tf.reduce_sum(tf.abs(phases) ** 2))


@late_program("Quantile normalization")
def quantiles_of_the_batch_for_each_row(model: Late, x: Any, y: Any, late: Any) -> Any:
    """Lookups along the last axis of a vector of rows, which is also its first one."""
    outputs = model(x)
    found = ops.quantile(outputs[:, 0], ops.sigmoid(outputs[:, 1]))
    nearest = tf.argmin(tf.abs(outputs[:, :1] - tf.transpose(outputs[:, 1:2])), 1)
    found += tf.gather(outputs[:, 0], nearest, axis=-1)
    return entropy(y, outputs) + late * tf.reduce_mean(found**2)


class WithTotals(Late):
    """Keeps two sums in one variable, to which a step adds a list."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self.totals = tf.Variable([0.0, 0.0], trainable=False, dtype="float64")


@program("A list of sums that a step adds to a variable", **EXACT)
def variable_that_gets_a_list() -> Made:
    """`assign_add` with a list of a sum of the batch and a number."""

    def loss(model: Any, x: Any, y: Any, late: Any) -> Any:
        model.totals.assign_add([late * tf.reduce_sum(x), 1.0])
        return entropy(y, model(x)) * (1 + tf.abs(model.totals[0] / model.totals[1]))

    return Made(WithTotals(loss), {"optimizer": sgd()}, DATA, evaluate=TEST)


class Squeezing(keras.Model):
    """Compares targets and predictions without their last axis, and tracks the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.tracker = layers.Dense(1), keras.metrics.Mean(name="tracker")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def _loss(self, data: Any) -> Any:
        x, y = data
        loss = tf.reduce_mean((tf.squeeze(y) - tf.squeeze(self(x))) ** 2)
        self.tracker.update_state(loss)
        return loss

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self._loss(data)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"tracker": self.tracker.result()}

    def test_step(self, data: Any) -> Any:
        self._loss(data)
        return {"tracker": self.tracker.result()}


@program("Stack Overflow: tf.squeeze of predictions", **EXACT)
def mean_of_squeezed_predictions() -> Made:
    """A mean over tensors whose rank is not known, in a Mean metric."""
    x, y = X[:22], X[:22, :1] * 2
    data = fit(x, y, batch_size=8, epochs=2)
    test = {"x": x, "y": y, "batch_size": 7}
    return Made(Squeezing(), {"optimizer": sgd()}, data, evaluate=test)


class Widest(keras.Model):
    """Gives each row as many numbers as the largest input of the batch needs."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(4)

    def call(self, x: Any) -> Any:
        width = tf.reduce_max(tf.cast(tf.abs(x) * 2, "int32")) % 3 + 1
        return self.dense(x)[:, :width]


@program("Sequences as long as the longest one of the batch", **EXACT)
def predictions_of_unequal_widths() -> Made:
    """Batches of predictions with other sizes, of which `predict` makes a ragged tensor."""
    model = Widest()
    model(X[:1])

    def predicted(model: keras.Model) -> dict[str, Any]:
        ragged = model.predict(X, batch_size=4, verbose=0)
        assert isinstance(ragged, tf.RaggedTensor)
        return {"rows": ragged.to_tensor(), "widths": ragged.row_lengths()}

    return Made(model, {"optimizer": "sgd"}, use=predicted)

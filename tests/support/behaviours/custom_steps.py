"""Trains custom steps whose batches are not (x, y), and other code of public programs."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support.behaviours.common import X, Y, classifier, fit, here
from tfmulti import prepare

PARTS = [np.random.default_rng(i).random((36, 3), np.float32) for i in range(3)]


class Critic(keras.Model):
    """Has no `call`, and `metrics` returns what `compile` makes, as in a DCGAN."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

    def compile(self, critic_optimizer: keras.optimizers.Optimizer) -> None:
        super().compile()
        self.critic_optimizer = critic_optimizer
        self.critic_loss = keras.metrics.Mean(name="critic_loss")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.critic_loss]

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.critic(data)))
        weights = self.critic.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.critic_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.critic_loss.update_state(loss)
        return {"critic_loss": self.critic_loss.result()}


def metrics_that_compile_makes() -> Any:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        model = prepare(Critic())
        model.compile(keras.optimizers.SGD(0.1))
    return model.fit(PARTS[0], batch_size=8, epochs=2, shuffle=False, verbose=0).history


class Siamese(keras.Model):
    """Embeds three examples of each row. `parts_of` takes them from a batch."""

    def __init__(self, parts_of: Callable[[Any], Any]) -> None:
        super().__init__()
        self.embed = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        self.parts_of = parts_of
        self.mean = keras.metrics.Mean(name="loss")

    def call(self, inputs: Any) -> Any:
        return self.embed(inputs)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.mean]

    def _loss(self, data: Any) -> tf.Tensor:
        anchor, like, unlike = map(self.embed, self.parts_of(data))
        near = tf.reduce_sum(tf.square(anchor - like), -1)
        far = tf.reduce_sum(tf.square(anchor - unlike), -1)
        return tf.reduce_mean(tf.maximum(near - far + 0.5, 0.0))

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self._loss(data)
        weights = self.embed.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.mean.update_state(loss)
        return {"loss": self.mean.result()}

    def test_step(self, data: Any) -> dict[str, Any]:
        self.mean.update_state(self._loss(data))
        return {"loss": self.mean.result()}


def _siamese(data: Any, parts_of: Callable[[Any], Any]) -> Any:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        model = prepare(Siamese(parts_of))
        model.compile(keras.optimizers.Adam(0.1))
    batches = tf.data.Dataset.from_tensor_slices(data).batch(8)
    return model.fit(batches, epochs=2, validation_data=batches, verbose=0).history


def batches_of_three_inputs() -> Any:
    return _siamese(tuple(PARTS), lambda data: data)


def batches_in_dicts() -> Any:
    return _siamese(dict(zip("abc", PARTS, strict=True)), lambda d: (d["a"], d["b"], d["c"]))


def batches_of_one_tensor() -> Any:
    return _siamese(np.stack(PARTS, 1), lambda data: tf.unstack(data, axis=1))


class Normalizing(keras.layers.Layer):
    """A recurrent cell with a BatchNormalization."""

    state_size = 4

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.normalize = keras.layers.Dense(4), keras.layers.BatchNormalization()

    def build(self, shape: Any) -> None:
        self.dense.build((None, shape[-1] + 4))
        self.normalize.build((None, 4))

    def call(self, inputs: Any, states: Any, training: bool = False) -> Any:
        found = self.dense(keras.ops.concatenate([inputs, states[0]], -1))
        found = self.normalize(found, training=training)
        return found, [found]


def _recurrent(unroll: bool) -> Any:
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(2).random((20, 4, 3), np.float32)
    with here.strategy.scope():
        inputs = keras.Input((4, 3))
        outputs = keras.layers.RNN(Normalizing(), unroll=unroll)(inputs)
        model = prepare(keras.Model(inputs, outputs))
        model.compile("sgd", "mse")
    return model.fit(x, x[:, 0, :1], batch_size=8, shuffle=False, verbose=0).history


def batch_normalization_in_an_unrolled_cell() -> Any:
    return _recurrent(unroll=True)


def batch_normalization_in_a_cell() -> Any:
    return _recurrent(unroll=False)


def learning_rate_halved_by_a_callback() -> Any:
    """Returns the learning rate and the optimizer's step after each epoch."""
    found: list[float] = []

    class Halves(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            optimizer = self.model.optimizer
            optimizer.learning_rate = float(optimizer.learning_rate) / 2
            found.extend([float(np.array(optimizer.learning_rate)), int(optimizer.iterations)])

    fit(classifier(), callbacks=[Halves()])
    return found


class TextLogs(keras.Model):
    """A train_step whose logs have a text."""

    counts = True
    # Not a number, which all replicas would begin with.
    calls: Any = None

    def train_step(self, data: Any) -> dict[str, Any]:
        logs = super().train_step(data)
        of_inputs = tf.strings.as_string(data[0][0, 0])
        return {**logs, "text": f"call {next(self.calls)}" if self.counts else of_inputs}


class LogOfRows(keras.Model):
    """An evaluation whose log has a value for each row."""

    def test_step(self, data: Any) -> Any:
        x, y = data
        return {"of_rows": keras.losses.sparse_categorical_crossentropy(y, self(x), True)}


def log_of_rows() -> Any:
    """Returns the log of an evaluation, the losses of its rows, and the number of warnings."""
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        inputs = keras.Input((6,))
        model = prepare(LogOfRows(inputs, keras.layers.Dense(3)(inputs)))
        model.compile("sgd")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log = model.evaluate(X[:15], Y[:15], batch_size=15, verbose=0, return_dict=True)["of_rows"]
        outputs = model.predict(X[:15], verbose=0)
    losses = keras.losses.sparse_categorical_crossentropy(Y[:15], outputs, from_logits=True)
    told = [w for w in caught if "the log 'of_rows' is no number" in str(w.message)]
    return [np.asarray(log).tolist(), np.asarray(losses).tolist(), len(told)]


class PredictsANumber(keras.Model):
    """A model whose `predict_step` returns one number for all rows."""

    def predict_step(self, data: Any) -> Any:
        return keras.ops.sum(data)


def predictions_of_one_number() -> Any:
    """Returns what `predict` of one batch returns for such a model, by Keras and by tfmulti."""
    alone = PredictsANumber()
    with here.strategy.scope():
        prepared = prepare(PredictsANumber())
    return [float(model.predict(X[:8], verbose=0)) for model in (alone, prepared)]


def _text_logs(*, counts: bool, eagerly: bool = False) -> Any:
    with here.strategy.scope():
        inputs = keras.Input((3,))
        model = prepare(TextLogs(inputs, keras.layers.Dense(1)(inputs)), verify=False)
        model.counts, model.calls = counts, itertools.count(1)
        model.compile("sgd", "mse", run_eagerly=eagerly)
    history = model.fit(PARTS[0], PARTS[1][:, :1], batch_size=12, verbose=0).history
    return str(history["text"])


def a_text_of_the_inputs() -> Any:
    return _text_logs(counts=False)


def texts_that_count_calls(case: str) -> Any:
    return _text_logs(counts=True, eagerly=case == "eager")

"""What a gradient tape records: programs that stop, begin anew or nest their tapes.

A value of all rows that a tape has not recorded is a constant for this tape alone.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tests.programs.common import labels, rng, sgd
from tests.programs.late_effects import DATA, EXACT, TEST, Late, entropy, late_program
from tests.programs.registry import Made, program


@late_program("A gradient penalty by inputs that a tape watches late")
def inputs_watched_late(model: Late, x: Any, y: Any, late: Any) -> Any:
    """A value of all rows that is computed before the tape watches the inputs."""
    with tf.GradientTape() as tape:
        largest = tf.reduce_max(x)
        tape.watch(x)
        found = tf.reduce_mean(model(x) ** 2) * largest
    return entropy(y, model(x)) + late * tf.reduce_mean(tape.gradient(found, x) ** 2)


@late_program("A tape that begins anew by reset")
def tape_that_begins_anew(model: Late, x: Any, y: Any, late: Any) -> Any:
    """A value of all rows that is computed before `tape.reset()`."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        largest = tf.reduce_max(x)
        tape.reset()
        tape.watch(x)
        found = tf.reduce_mean(model(x) ** 2) * largest
    return entropy(y, model(x)) + late * tf.reduce_mean(tape.gradient(found, x) ** 2)


@late_program("A tape that records in two blocks")
def tape_entered_twice(model: Late, x: Any, y: Any, late: Any) -> Any:
    """A value of all rows from the first block, and a loss in the second one."""
    with tf.GradientTape(persistent=True) as tape:
        outputs = model(x)
        largest = tf.reduce_max(outputs)
    between = tf.reduce_max(outputs, 0)
    with tape:
        found = tf.reduce_mean(outputs**2 * between) * largest
    gradient = tape.gradient(found, model.net.trainable_variables)
    return entropy(y, model(x)) + late * tf.linalg.global_norm(gradient)


@late_program("stop_recording of one of two tapes")
def one_of_two_tapes_stopped(model: Late, x: Any, y: Any, late: Any) -> Any:
    """A value of all rows that is a constant for the inner tape, and not for the outer one."""
    with tf.GradientTape() as inner:
        outputs = model(x)
        with inner.stop_recording():
            largest = tf.reduce_max(outputs)
        found = tf.reduce_mean(outputs**2) * largest
    gradient = inner.gradient(found, model.net.trainable_variables)
    return entropy(y, model(x)) + late * tf.linalg.global_norm(gradient)


@late_program("A second tape for a part of the loss")
def outputs_watched_by_another_tape(model: Late, x: Any, y: Any, late: Any) -> Any:
    """Rows of one tape that another tape watches; the loss is differentiated by the first one."""
    with tf.GradientTape(persistent=True) as first:
        rows = tf.roll(tf.tanh(model(x)), 1, 0) * tf.tanh(tf.reduce_max(x))
    with tf.GradientTape() as second:
        second.watch(rows)
        between = tf.reduce_mean(rows**2) * tf.reduce_max(rows)
    slopes = tf.reduce_mean(second.gradient(between, rows) ** 2)
    with first:
        found = tf.reduce_mean(rows**4) * tf.reduce_max(rows)
    gradient = first.gradient(found, model.net.trainable_variables)
    return entropy(y, model(x)) + late * (slopes + tf.linalg.global_norm(gradient))


@late_program("Lookups in a table that is computed before the tape")
def table_before_the_tape(model: Late, x: Any, y: Any, late: Any) -> Any:
    """Each row looks up what belongs to the next one, under two tapes."""
    before, ids = 2.0 * model.net.trainable_variables[0], tf.cast(tf.abs(x[:, 0]) > 0.5, "int32")
    ids = tf.roll(ids, 1, 0)
    with tf.GradientTape() as tape:
        now = 3.0 * model.net.trainable_variables[0]
        found = tf.reduce_mean((tf.gather(before, ids) + tf.gather(now, ids)) ** 2)
    gradient = tf.convert_to_tensor(tape.gradient(found, model.net.trainable_variables[0]))
    return entropy(y, model(x)) + late * tf.reduce_mean(gradient**2)


@late_program("A target that is computed while the tape is stopped, as in BYOL")
def layer_called_while_a_tape_is_stopped(model: Late, x: Any, y: Any, late: Any) -> Any:
    """A layer gets moved rows while the tape is stopped, and gets them again while it records."""
    with tf.GradientTape() as tape:
        outputs = model(x)
        rows = tf.roll(tf.tanh(outputs), 1, 0)
        projected = tf.pad(rows, [[0, 0], [0, 1]])
        with tape.stop_recording():
            target = model(projected)
        found = tf.reduce_mean(model(projected) * target) + tf.reduce_mean(outputs**2)
    gradient = tape.gradient(found, model.net.trainable_variables)
    return entropy(y, outputs) + late * tf.linalg.global_norm(gradient)


class ClipsApart(Late):
    """Clips its gradient while the tape is stopped, and adds the gradient's norm to the loss."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        weights = self.net.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            outputs = self(x)
            loss = entropy(y, outputs)
            with tape.stop_recording():
                gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, weights), 0.1)
                self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            found = loss * norm + tf.reduce_max(outputs)
        gradients = tape.gradient(found, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"found": found, "norm": norm}


@program("TensorFlow: Introduction to gradients and automatic differentiation", **EXACT)
def update_while_a_tape_is_stopped() -> Made:
    """A gradient is clipped and applied inside `stop_recording`, and another one after it."""
    return Made(ClipsApart(lambda *_: 0.0), {"optimizer": sgd(0.05)}, DATA)


class Reader(keras.Model):
    """Reads words in another order of the rows, with masks, layers by keyword and a mixed state."""

    def __init__(self) -> None:
        super().__init__()
        self.words = layers.Embedding(5, 4, mask_zero=True)
        self.dense, self.normalized = layers.Dense(4, "tanh"), layers.BatchNormalization()
        self.first, self.second = layers.LSTM(3), layers.Bidirectional(layers.GRU(2))
        self.out = layers.Dense(3)

    def call(self, words: Any, training: bool = False) -> Any:
        moved = self.dense(self.words(tf.cumsum(words, 0) % 3))
        turned = self.normalized(inputs=self.words(words[::-1]), training=training)
        state = tf.roll(tf.cast(words[:, :3], moved.dtype), 1, 0)
        read = self.first(sequences=moved, initial_state=[state, 0.5 * state])
        return self.out(tf.concat([read, self.second(turned)], 1))


@program("Sequences with masks in another order of the rows", **EXACT)
def masked_rows_in_another_order() -> Made:
    """Masks, keyword inputs and states of mixed rows before recurrent layers."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    words = rng().integers(0, 5, (25, 6)).astype("int32")
    data = {"x": words, "y": labels(25), "batch_size": 8, "epochs": 2}
    test = {**TEST, "x": words}
    return Made(Reader(), {"optimizer": sgd(), "loss": loss}, data, evaluate=test)

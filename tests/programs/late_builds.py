"""Programs in which parts of a model are built late: layers of training alone, slots, metrics."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tests.programs.common import SPARSE, adam, features, fit, labels
from tests.programs.precision import NOT_SENT
from tests.programs.registry import Made, program

X, Y = features(4), labels()
EVALUATED = {"x": X, "y": Y, "batch_size": 16}


class Deep(layers.Layer):
    """Calls a layer in training that no other call needs."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.extra = layers.Dense(5, "tanh"), layers.Dense(5)

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = self.always(x)
        return hidden + self.extra(hidden) if training else hidden


@program("a layer with a part that only training uses")
def layer_of_training_alone() -> Made:
    """A Sequential model with a layer that calls another one in training alone."""
    model = keras.Sequential([keras.Input((4,)), Deep(), layers.Dense(3, "softmax")])
    return Made(model, {"optimizer": adam(), "loss": SPARSE}, fit(X, Y), EVALUATED)


class AuxiliaryHead(keras.Model):
    """Adds the outputs of a second head in training."""

    def __init__(self) -> None:
        super().__init__()
        self.body = layers.Dense(5, "tanh")
        self.head, self.second = layers.Dense(3, "softmax"), layers.Dense(3, "softmax")

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = self.body(x)
        outputs = self.head(hidden)
        return 0.7 * outputs + 0.3 * self.second(hidden) if training else outputs


def _evaluated(model: keras.Model) -> dict[str, Any]:
    return {"before": model.evaluate(**EVALUATED, verbose=0)}


@program("deep supervision: a second head in training")
def head_of_training_alone() -> Made:
    """A subclassed model that is evaluated before a training whose `call` needs one layer more."""

    def use(model: keras.Model) -> dict[str, Any]:
        before = _evaluated(model)
        return before | model.fit(**fit(X, Y), validation_data=(X, Y), verbose=0).history

    return Made(AuxiliaryHead(), {"optimizer": adam(), "loss": SPARSE}, use=use)


def _classifier() -> keras.Model:
    hidden = layers.Dense(5, "tanh", name="hidden")
    return keras.Sequential([keras.Input((4,)), hidden, layers.Dense(3, "softmax")])


@program("weights that are freed and frozen after an evaluation, without compile")
def weights_freed_after_an_evaluation() -> Made:
    """An evaluation, then other trained weights, and an optimizer that averages the weights."""

    def use(model: keras.Model) -> dict[str, Any]:
        before = _evaluated(model)
        model.get_layer("hidden").trainable = False
        return before | model.fit(**fit(X, Y), verbose=0).history

    optimizer = keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=2)
    return Made(_classifier(), {"optimizer": optimizer, "loss": SPARSE}, use=use)


class Frees(keras.callbacks.Callback):
    """Lets a layer train from the beginning of the first epoch on."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.get_layer("hidden").trainable = True


def _freed(**compiled: Any) -> Made:
    model = _classifier()
    model.get_layer("hidden").trainable = False
    arguments = fit(X, Y, callbacks=[Frees()])
    return Made(model, {"optimizer": adam(), "loss": SPARSE, **compiled}, arguments, EVALUATED)


@program("a callback that frees a layer before the first step")
def weights_freed_by_a_callback() -> Made:
    """A callback decides before the first step which weights the optimizer gets."""
    return _freed()


@program("Keras: compile(run_eagerly=True), with a callback that frees a layer")
def weights_freed_by_a_callback_in_eager_mode() -> Made:
    """A callback decides before the first eager step which weights the optimizer gets."""
    return _freed(run_eagerly=True)


@program("Keras: LossScaleOptimizer, with a callback that frees a layer")
def weights_freed_with_scaled_losses() -> Made:
    """An evaluation, then a callback that decides which weights an optimizer with a scale gets."""

    def use(model: keras.Model) -> dict[str, Any]:
        before = _evaluated(model)
        return before | model.fit(**fit(X, Y, callbacks=[Frees()]), verbose=0).history

    model = _classifier()
    model.get_layer("hidden").trainable = False
    optimizer = keras.optimizers.LossScaleOptimizer(adam(), initial_scale=64.0)
    return Made(model, {"optimizer": optimizer, "loss": SPARSE}, use=use)


class CompilesAgain(keras.callbacks.Callback):
    """Compiles the model with another optimizer before the second epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.model.compile(keras.optimizers.Adam(0.003), SPARSE, metrics=["accuracy"])
            self.model.make_train_function(force=True)


@program("a callback that compiles the model between two epochs")
def compiled_again_by_a_callback() -> Made:
    """A callback compiles with new metrics, and makes a new train function."""
    arguments = fit(X, Y, callbacks=[CompilesAgain()])
    compiled = {"optimizer": adam(), "loss": SPARSE, "metrics": ["accuracy"]}
    return Made(_classifier(), compiled, arguments, EVALUATED)


@program("another train function after compile, before a fit with other targets")
def compiled_again_for_other_targets() -> Made:
    """The metrics of a second compile are those for the targets of the next fit."""

    def use(model: keras.Model) -> dict[str, Any]:
        first = model.fit(**fit(X, Y), verbose=0).history
        with model.distribute_strategy.scope():
            model.compile(adam(), "categorical_crossentropy", metrics=["accuracy"])
        model.make_train_function(force=True)
        targets = keras.utils.to_categorical(Y, 3)
        second = model.fit(**fit(X, targets), verbose=0).history
        return {f"1/{k}": v for k, v in first.items()} | {f"2/{k}": v for k, v in second.items()}

    compiled = {"optimizer": adam(), "loss": SPARSE, "metrics": ["accuracy"]}
    return Made(_classifier(), compiled, use=use)


class Spectrum(layers.Layer):
    """Subtracts a moving average of the spectra of the rows."""

    def build(self, shape: Any) -> None:
        self.average = tf.Variable(tf.zeros([3], tf.complex64), trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        spectra = tf.signal.rfft(x)
        if training:
            self.average.assign(0.9 * self.average + 0.1 * tf.reduce_mean(spectra, 0))
        return tf.concat([x, tf.abs(spectra - self.average)], -1)


@program("a moving average of spectra in a complex tf.Variable", expects=NOT_SENT)
def average_of_complex_numbers() -> Made:
    """A layer with a state of complex numbers."""
    model = keras.Sequential([keras.Input((4,)), Spectrum(), layers.Dense(3, "softmax")])
    return Made(model, {"optimizer": adam(), "loss": SPARSE}, fit(X, Y), EVALUATED)

"""Number types and ways to run: float64, mixed types, eager steps, several steps at a time."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.programs.common import SPARSE, adam, classifier, features, fit, labels, sgd, tokens
from tests.programs.registry import Made, program

X, Y = features(4), labels()
# TensorFlow's message for variables of short types on several workers.
NOT_SENT = "is not in the list of allowed values"


@program("Keras: set_floatx", tolerance=1e-12, floatx="float64")
def double_precision() -> Made:
    """All numbers as float64, arrays too."""
    return Made(
        classifier(layers.BatchNormalization(), layers.Dropout(0.2)),
        {"optimizer": adam(), "loss": SPARSE, "metrics": ["accuracy"]},
        fit(X.astype("float64"), Y),
        predict={"x": X.astype("float64")},
    )


@program(
    "Keras: set_floatx, with BatchNormalization of a masked sequence",
    tolerance=1e-12,
    floatx="float64",
)
def masked_batch_normalization() -> Made:
    """Statistics of the values that the mask keeps, behind a layer whose bias they cancel."""
    inputs = keras.Input((5, 3))
    hidden = layers.Dense(4)(layers.Masking()(inputs))
    hidden = layers.Dense(4, "tanh")(layers.BatchNormalization()(hidden))
    outputs = layers.Dense(3, "softmax")(layers.GlobalAveragePooling1D()(hidden))
    x = features(5, 3)
    # Each sequence keeps a step, since the mean of no values is NaN.
    x[:, 1:][features(5)[:, 1:] < 0] = 0.0
    # Adam would make a whole step of each gradient that is nearly 0.
    return Made(
        keras.Model(inputs, outputs),
        {"optimizer": keras.optimizers.SGD(0.1), "loss": SPARSE},
        fit(x.astype("float64"), Y),
    )


class ScaledLosses(keras.Model):
    """Scales its loss by the optimizer, and logs the scaled loss."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = layers.Dense(5, "tanh"), layers.Dense(3, "softmax")

    def call(self, x: Any) -> Any:
        return self.last(self.hidden(x))

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, weights), weights)
        return {"loss": loss, "scaled": scaled}


@program("Keras guide: Mixed precision, with a train_step", tolerance=1e-12, floatx="float64")
def scaled_losses_of_a_step() -> Made:
    """A loss scale that grows in a train_step, for an optimizer that Keras builds in its trace."""
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=8, dynamic_growth_steps=2
    )
    given = {"optimizer": optimizer, "loss": SPARSE}
    return Made(ScaledLosses(), given, fit(X.astype("float64"), Y, epochs=3))


@program("Keras: set_floatx, with masks and noise", tolerance=1e-12, floatx="float64")
def masked_losses_and_noise() -> Made:
    """A mean over masked steps, and normal noise."""
    x = tokens()
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(9, 4, mask_zero=True),
            layers.GRU(4, return_sequences=True),
            layers.GaussianDropout(0.3, seed=3),
            layers.Dense(3, "softmax"),
        ]
    )
    return Made(
        model,
        {"optimizer": sgd(), "loss": SPARSE},
        fit(x, x % 3),
    )


def absolute_errors(y_true: Any, y_pred: Any) -> Any:
    """A metric with a value for each row."""
    return keras.ops.mean(keras.ops.abs(y_pred - y_true), -1)


@program("Keras: set_floatx, in eager mode", tolerance=1e-12, floatx="float64")
def weighted_metric_in_eager_mode() -> Made:
    """A metric of one's own in eager steps, by weights that are no whole numbers."""
    return Made(
        keras.Sequential([keras.Input((4,)), layers.Dense(2)]),
        {
            "optimizer": sgd(),
            "loss": "mse",
            "weighted_metrics": [absolute_errors],
            "run_eagerly": True,
        },
        fit(
            X.astype("float64"),
            features(2).astype("float64"),
            sample_weight=np.linspace(0.1, 0.7, len(X)),
        ),
    )


def _mixed(policy: str) -> Made:
    keras.config.set_dtype_policy(policy)
    inputs = keras.Input((4,))
    hidden = layers.LayerNormalization()(layers.Dense(5, "tanh")(inputs))
    model = keras.Model(inputs, layers.Dense(3, "softmax", dtype="float32")(hidden))
    return Made(model, {"optimizer": sgd(), "loss": SPARSE}, fit(X, Y))


@program("TensorFlow guide: Mixed precision", tolerance=3e-2)
def mixed_bfloat16() -> Made:
    """Layers that compute in bfloat16."""
    return _mixed("mixed_bfloat16")


@program("TensorFlow guide: Mixed precision", "keras-io: GPT2 with KerasHub", tolerance=4e-3)
def mixed_float16() -> Made:
    """Layers that compute in float16, with a scaled loss."""
    return _mixed("mixed_float16")


@program(
    "keras-io: Float8 training and inference with a simple Transformer model",
    expects="takes its gradient as its value, as in float8 training",
)
def float8_training() -> Made:
    """Dense layers quantized to float8, whose scales follow from the largest value of a batch."""
    made = Made(classifier(), {"optimizer": adam(), "loss": SPARSE}, fit(X, Y))
    made.model.quantize("float8")
    return made


class LowRank(keras.callbacks.Callback):
    """Replaces the weights by whole numbers and trains low-rank updates of them."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.model.quantize("int8")
            for layer in self.model.layers:
                if isinstance(layer, layers.Dense):
                    layer.enable_lora(2)
            self.model.compile(adam(), SPARSE)
            self.model.make_train_function(force=True)


@program("keras-io: Parameter-efficient fine-tuning of Gemma with LoRA and QLoRA", expects=NOT_SENT)
def low_rank_updates_of_quantized_weights() -> Made:
    """Layers that are quantized to int8 in training, and then trained by `enable_lora`."""
    given = {"optimizer": adam(), "loss": SPARSE}
    return Made(classifier(), given, fit(X, Y, epochs=3, callbacks=[LowRank()]))


class Scaled(layers.Layer):
    """Multiplies by a weight that is one number, and counts its calls."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        self.calls.assign_add(tf.ones((), self.calls.dtype))
        return self.scale * x


class StepInBfloat16(keras.Model):
    """Computes the loss in the type of the layers, and logs it so."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            errors = self(x, training=True) - tf.cast(y, self.compute_dtype)
            loss = tf.reduce_mean(tf.square(errors))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@program(
    "Keras: set_dtype_policy",
    expects=NOT_SENT,
    # Ten units in the last place of bfloat16.
    tolerance=8e-2,
)
def weights_in_bfloat16() -> Made:
    """Weights and logs in bfloat16, some of which are one number."""
    keras.config.set_dtype_policy("bfloat16")
    inputs = keras.Input((4,))
    outputs = layers.Dense(1)(Scaled()(layers.Dense(5, "tanh")(inputs)))
    model = StepInBfloat16(inputs, outputs)
    return Made(model, {"optimizer": sgd()}, fit(X, X[:, :1]))


@program("Keras: compile(run_eagerly=True)")
def eager_steps() -> Made:
    """Steps that run eagerly."""
    given = {"optimizer": sgd(), "loss": SPARSE, "run_eagerly": True, "metrics": ["accuracy"]}
    return Made(classifier(layers.Dropout(0.2)), given, fit(X, Y, epochs=1))


class Fading(layers.Layer):
    """Multiplies by a number that becomes smaller with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def call(self, inputs: Any) -> Any:
        self.calls += 1
        return inputs / (1 + 0.1 * self.calls)


class Counting(keras.Model):
    """Counts its updates by a Python number, which decides what a step does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.updates = 0

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        for _ in range(2 if self.updates % 3 else 1):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x)) / (1 + self.updates)
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            self.updates += 1
        return {"loss": loss, "updates": self.updates}


@program("Keras: compile(run_eagerly=True), with an activity regularizer")
def activity_losses_in_eager_mode() -> Made:
    """Losses of layers in eager steps, and layers and a loss for which replicas wait."""
    regularized = layers.Dense(4, "tanh", activity_regularizer="l2")
    model = classifier(regularized, layers.BatchNormalization())
    given = {"optimizer": sgd(), "loss": keras.losses.Dice(), "run_eagerly": True}
    return Made(model, given, fit(features(4), np.eye(3, dtype="float32")[labels()]))


@program(
    "Keras: compile(run_eagerly=True), with IntegerLookup(sparse=True)",
    expects="verify: .*'dense/kernel' differs from one device.*Leave run_eagerly=True out",
)
def sparse_features_in_eager_mode() -> Made:
    """A product with a sparse tensor in eager steps, in which replicas look up the same entries."""
    inputs = keras.Input((3,), dtype="int64")
    lookup = layers.IntegerLookup(vocabulary=list(range(9)), output_mode="multi_hot", sparse=True)
    model = keras.Model(inputs, layers.Dense(3, "softmax")(lookup(inputs)))
    given = {"optimizer": adam(), "loss": SPARSE, "run_eagerly": True}
    return Made(model, given, fit(np.random.default_rng(3).integers(0, 10, (30, 3)), Y))


@program("Keras: compile(run_eagerly=True), with a counter of the steps")
def eager_steps_that_count_in_python() -> Made:
    """Eager steps with one or two updates, as a Python number decides, and a layer that counts."""
    inputs = keras.Input((4,))
    outputs = layers.Dense(3, "softmax")(Fading()(layers.Dense(5, "tanh")(inputs)))
    given = {"optimizer": sgd(), "loss": SPARSE, "run_eagerly": True}
    rows: dict[str, Any] = {"x": X, "batch_size": 16}
    model = Counting(inputs, outputs)
    return Made(model, given, fit(X, Y), evaluate={"y": Y, **rows}, predict=rows)


@program("Keras: compile(steps_per_execution)")
def several_steps_at_a_time() -> Made:
    """Several steps an execution, which does not divide the epoch."""
    given: dict[str, Any] = {"optimizer": sgd(), "loss": SPARSE, "steps_per_execution": 3}
    return Made(classifier(layers.Dropout(0.2)), given, fit(X, Y, batch_size=7))


@program(
    "Keras guide: compile without a scope's help",
    "keras-io: Learning to Resize in Computer Vision",
    "keras-io: Image classification with EANet (External Attention Transformer)",
)
def logits_without_a_softmax() -> Made:
    """Logits with a loss that knows it, and label smoothing."""
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    target = keras.ops.one_hot(Y, 3)
    return Made(
        classifier(final=None),
        {"optimizer": sgd(), "loss": loss},
        fit(X, keras.ops.convert_to_numpy(target)),
    )

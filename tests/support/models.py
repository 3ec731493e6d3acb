"""The models of the cases: small models, one for each kind of mistake that tfmulti could make."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tests.support.data import CLASSES


def functional() -> keras.Model:
    inputs = keras.Input((8,))
    x = layers.Dense(16, "tanh")(inputs)
    return keras.Model(inputs, layers.Dense(CLASSES, "softmax")(x))


def sequential() -> keras.Model:
    # Without an Input, `fit` builds the model.
    return keras.Sequential([layers.Dense(16, "tanh"), layers.Dense(CLASSES, "softmax")])


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(16, "tanh")
        self.out = layers.Dense(CLASSES, "softmax")

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))


class CustomStep(keras.Model):
    """Has a custom train_step in the style of Keras' guide, and its own loss tracker."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(16, "tanh")
        self.out = layers.Dense(CLASSES, "softmax")
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.hits = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        self.loss_object = keras.losses.SparseCategoricalCrossentropy()

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.loss_tracker, self.hits]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_object(y, y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        self.hits.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        y_pred = self(x, training=False)
        self.loss_tracker.update_state(self.loss_object(y, y_pred), sample_weight=tf.shape(x)[0])
        self.hits.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class GuideStep(CustomStep):
    """Has a step like the loops of TensorFlow's guide, which clips gradients itself."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(y, y_pred)
            loss = tf.nn.compute_average_loss(losses)
            penalties = [1e-2 * tf.nn.l2_loss(v) for v in self.trainable_variables]
            loss += tf.nn.scale_regularization_loss(tf.add_n(penalties))
        gradients = tape.gradient(loss, self.trainable_variables)
        norm = tf.linalg.global_norm(gradients)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.3 * norm, use_norm=norm)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        self.hits.update_state(y, y_pred)
        return {"norm": norm} | {metric.name: metric.result() for metric in self.metrics}


class GuideStepOf30(CustomStep):
    """The same step with a fixed global batch size, even for a smaller batch."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=30)
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class TracksBatches(CustomStep):
    """Has a step that updates its tracker with the loss of a batch, without the number of rows."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_object(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


def of(*middle: keras.layers.Layer) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, "tanh"),
            *middle,
            layers.Dense(CLASSES, "softmax"),
        ]
    )


def convolutional() -> keras.Model:
    """Layers that fail on a batch without rows: convolution, pooling, recurrence."""
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Reshape((8, 1)),
            layers.Conv1D(4, 3, activation="relu"),
            layers.MaxPooling1D(2),
            layers.LayerNormalization(),
            layers.LSTM(5),
            layers.Dense(CLASSES, "softmax"),
        ]
    )


def masked() -> keras.Model:
    """A model with a loss for each time step, over the time steps that are not masked."""
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Embedding(4, 6, mask_zero=True),
            layers.Dense(5, "tanh"),
            layers.Dense(CLASSES, "softmax"),
        ]
    )


def batch_normalized() -> keras.Model:
    """BatchNormalization of values far from 0, where sums of squares lose digits, and of images."""
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Rescaling(1.0, 20.0),
            layers.BatchNormalization(momentum=0.8),
            layers.Reshape((8, 1)),
            layers.Conv1D(4, 3, activation="relu"),
            layers.BatchNormalization(momentum=0.8),
            layers.Flatten(),
            layers.Dense(CLASSES, "softmax"),
        ]
    )


def images_normalized() -> keras.Model:
    """BatchNormalization after convolutions, with and without scale and center."""
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Reshape((2, 4, 1)),
            layers.UpSampling2D((4, 2)),
            layers.BatchNormalization(momentum=0.8),
            layers.Conv2D(4, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.8, scale=False),
            layers.Activation("relu"),
            layers.Conv2D(3, 3, strides=2),
            layers.BatchNormalization(momentum=0.8, center=False),
            layers.Flatten(),
            layers.Dense(CLASSES, "softmax"),
        ]
    )


def group_normalized() -> keras.Model:
    return of(layers.GroupNormalization(4), layers.LayerNormalization())


def attentive() -> keras.Model:
    """Transformer blocks with a padding mask and a causal mask."""
    inputs = keras.Input((8,))
    x = layers.Embedding(4, 6, mask_zero=True)(inputs)
    for causal in (False, True):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(2, 3)(y, y, use_causal_mask=causal)])
        y = layers.Dense(12, "relu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(6)(y)])
    x = layers.LayerNormalization()(x)
    return keras.Model(inputs, layers.Dense(CLASSES, "softmax")(x))


def dropped() -> keras.Model:
    return of(layers.Dropout(0.4), layers.GaussianNoise(0.3), layers.AlphaDropout(0.2))


def recurrent_dropped() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Reshape((8, 1)),
            layers.SpatialDropout1D(0.3),
            layers.SimpleRNN(5, dropout=0.3, recurrent_dropout=0.3),
            layers.Dense(CLASSES, "softmax"),
        ]
    )


class Noise(keras.layers.Layer):
    """Draws numbers of all kinds for each example, and a matrix and a number for the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    def call(self, x: Any) -> Any:
        shape = keras.ops.shape(x)
        x = x + 0.1 * keras.random.truncated_normal(shape, seed=self.seed)
        x = x * keras.ops.cast(keras.random.randint(shape, 1, 4, seed=self.seed), x.dtype)
        x = x * keras.random.beta((shape[0], 1), 2.0, 3.0, seed=self.seed)
        x = x + 0.1 * keras.random.gamma(shape, 0.5, seed=self.seed)
        x = x + 0.1 * keras.random.binomial((*shape, 1), 3.0, 0.5, seed=self.seed)[..., 0]
        kinds = keras.random.categorical(keras.ops.stop_gradient(x), 1, seed=self.seed)
        x = x + 0.1 * keras.ops.cast(kinds, x.dtype)
        order = keras.random.shuffle(keras.ops.arange(16), seed=self.seed)
        shared = keras.random.dropout(keras.ops.ones((16, 16)), 0.3, seed=self.seed)
        shared = keras.ops.take(shared, order, 0) * keras.random.gamma((16,), 2.0, seed=self.seed)
        return (
            0.1 * keras.ops.matmul(x, shared) * keras.random.uniform((), 0.5, 1.5, seed=self.seed)
        )


def noisy() -> keras.Model:
    return of(Noise())


def augmented() -> keras.Model:
    """Images of 4×4, each augmented by random numbers of its own."""
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, "tanh"),
            layers.Reshape((4, 4, 1)),
            layers.RandomFlip(seed=1),
            layers.RandomTranslation(0.3, 0.3, seed=2),
            layers.RandomBrightness(0.4, value_range=(-1, 1), seed=3),
            layers.MixUp(seed=4),
            layers.CutMix(seed=5),
            layers.Flatten(),
            layers.Dense(CLASSES, "softmax"),
        ]
    )


class Equalized(keras.layers.Layer):
    """Applies Keras' Equalization. A functional model would skip it, since it returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.equalization = layers.Equalization(value_range=(-3, 3))

    def call(self, x: Any, training: bool = False) -> Any:
        return self.equalization(x, training=training)


def equalized() -> keras.Model:
    """The examples as images of 2×4, changed by histograms of all rows."""
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Reshape((2, 4, 1)),
            layers.RandAugment(value_range=(-3, 3), seed=1),
            Equalized(),
            layers.Flatten(),
            layers.Dense(CLASSES, "softmax"),
        ]
    )


def regularized() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, "tanh", kernel_regularizer="l2", activity_regularizer="l2"),
            layers.Dense(CLASSES, "softmax", bias_regularizer="l1"),
        ]
    )


class AddsLoss(keras.layers.Layer):
    """Adds two losses: a mean over rows, and a value for each row, which Keras sums."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        self.add_loss(0.01 * keras.ops.sum(keras.ops.square(x), axis=-1))
        return x


def with_added_losses() -> keras.Model:
    return of(AddsLoss())


def of_two_outputs() -> keras.Model:
    inputs = keras.Input((8,))
    x = layers.Dense(16, "tanh")(inputs)
    kind = layers.Dense(CLASSES, "softmax", name="kind")(x)
    return keras.Model(inputs, {"kind": kind, "size": layers.Dense(1, name="size")(x)})


def of_two_inputs() -> keras.Model:
    inputs = {"left": keras.Input((3,), name="left"), "right": keras.Input((5,), name="right")}
    x = layers.Concatenate()([layers.Dense(9, "tanh")(part) for part in inputs.values()])
    return keras.Model(inputs, layers.Dense(CLASSES, "softmax")(x))


def of_ragged_tokens() -> keras.Model:
    """Keras' own layers on rows of different lengths."""
    return keras.Sequential(
        [
            keras.Input((None,), dtype="int32", ragged=True),
            layers.Embedding(4, 6),
            layers.GlobalAveragePooling1D(),
            layers.Dense(CLASSES, "softmax"),
        ]
    )


def of_sparse_rows() -> keras.Model:
    """Keras' own layers on rows of which many numbers are 0."""
    return keras.Sequential(
        [
            keras.Input((8,), sparse=True),
            layers.Dense(6, "tanh"),
            layers.Dense(CLASSES, "softmax"),
        ]
    )


class OfRaggedRows(keras.Model):
    """Takes rows of different lengths, and averages the vectors of their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = layers.Embedding(4, 6)
        self.out = layers.Dense(CLASSES, "softmax")

    def build(self, shape: Any) -> None:
        self.vectors.build((None, None))
        self.out.build((None, 6))
        self.built = True

    def call(self, x: Any) -> Any:
        if isinstance(x, tf.RaggedTensor):
            flat = tf.gather(tf.convert_to_tensor(self.vectors.embeddings), x.flat_values)
            return self.out(tf.reduce_mean(x.with_flat_values(flat), axis=1))
        return self.out(keras.ops.mean(self.vectors(x), axis=1))

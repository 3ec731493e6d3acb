"""Autoencoders, flows and quantizers: losses that a step or a layer puts together."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.programs.common import adam, batches, features, fit, images
from tests.programs.registry import Made, program

SIZE = 6


class Sampling(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs: Any) -> Any:
        mean, log_var = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_var) * noise


def _encoder() -> keras.Model:
    inputs = keras.Input((SIZE, SIZE, 1))
    hidden = layers.Flatten()(layers.Conv2D(2, 3, strides=2, activation="tanh")(inputs))
    mean, log_var = layers.Dense(2)(hidden), layers.Dense(2)(hidden)
    return keras.Model(inputs, [mean, log_var, Sampling()([mean, log_var])])


def _decoder() -> keras.Model:
    inputs = keras.Input((2,))
    hidden = layers.Reshape((3, 3, 2))(layers.Dense(18, "tanh")(inputs))
    outputs = layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="sigmoid")
    return keras.Model(inputs, outputs(hidden))


class Vae(keras.Model):
    """The reconstruction is summed over pixels; `beta` is a weight that a callback may change."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = _encoder(), _decoder()
        self.beta = tf.Variable(1.0, trainable=False)
        self.total = keras.metrics.Mean(name="total_loss")
        self.kl = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.total, self.kl]

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            mean, log_var, latent = self.encoder(data)
            rebuilt = self.decoder(latent)
            entropy = keras.losses.binary_crossentropy(data, rebuilt)
            reconstruction = ops.mean(ops.sum(entropy, axis=(1, 2)))
            kl = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
            kl = ops.mean(ops.sum(kl, axis=1))
            loss = reconstruction + self.beta * kl
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total.update_state(loss)
        self.kl.update_state(kl)
        return {"loss": self.total.result(), "kl_loss": self.kl.result()}


@program("keras-io: Variational AutoEncoder")
def vae() -> Made:
    """A sampling layer, a loss of sums over pixels and means over rows, a metric by another key."""
    return Made(Vae(), {"optimizer": adam()}, fit(images()))


class Annealing(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.beta.assign(0.25 * (epoch + 1))


@program("keras-io: Variational AutoEncoder", "TensorFlow tutorial: Convolutional VAE")
def vae_with_annealing() -> Made:
    """A callback that changes a variable of the loss at each epoch."""
    return Made(Vae(), {"optimizer": adam()}, fit(images(), epochs=3, callbacks=[Annealing()]))


class AddedKl(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = _encoder(), _decoder()

    def call(self, inputs: Any) -> Any:
        mean, log_var, latent = self.encoder(inputs)
        self.add_loss(-0.05 * ops.mean(log_var - ops.square(mean) - ops.exp(log_var) + 1))
        return self.decoder(latent)


@program("Keras guide: Making new layers and models via subclassing")
def vae_with_added_loss() -> Made:
    """A subclassed model that adds its divergence to the loss in call."""
    x = images()
    return Made(AddedKl(), {"optimizer": adam(), "loss": "mse"}, fit(x, x))


class Quantizer(layers.Layer):
    def __init__(self, codes: int, width: int) -> None:
        super().__init__()
        self.codes, self.width = codes, width

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(
            shape=(self.width, self.codes), initializer="random_uniform", name="table"
        )

    def call(self, x: Any) -> Any:
        flat = tf.reshape(x, [-1, self.width])
        distances = (
            tf.reduce_sum(flat**2, axis=1, keepdims=True)
            + tf.reduce_sum(self.table**2, axis=0)
            - 2 * tf.matmul(flat, self.table)
        )
        chosen = tf.one_hot(tf.argmin(distances, axis=1), self.codes)
        quantized = tf.reshape(tf.matmul(chosen, self.table, transpose_b=True), tf.shape(x))
        self.add_loss(
            0.25 * tf.reduce_mean((tf.stop_gradient(quantized) - x) ** 2)
            + tf.reduce_mean((quantized - tf.stop_gradient(x)) ** 2)
        )
        return x + tf.stop_gradient(quantized - x)


class VqTrainer(keras.Model):
    def __init__(self, variance: float, *after: layers.Layer) -> None:
        super().__init__()
        self.variance = variance
        inputs = keras.Input((SIZE, SIZE, 1))
        hidden = layers.Conv2D(3, 3, strides=2, padding="same", activation="tanh")(inputs)
        hidden = Quantizer(4, 3)(hidden)
        for layer in after:
            hidden = layer(hidden)
        outputs = layers.Conv2DTranspose(1, 3, strides=2, padding="same")(hidden)
        self.vqvae = keras.Model(inputs, outputs)
        self.total = keras.metrics.Mean(name="total_loss")
        self.quantization = keras.metrics.Mean(name="vq_loss")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.total, self.quantization]

    def train_step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            rebuilt = self.vqvae(x, training=True)
            reconstruction = tf.reduce_mean((x - rebuilt) ** 2) / self.variance
            loss = reconstruction + sum(self.vqvae.losses)
        gradients = tape.gradient(loss, self.vqvae.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.vqvae.trainable_variables, strict=True))
        self.total.update_state(loss)
        self.quantization.update_state(sum(self.vqvae.losses))
        return {"loss": self.total.result(), "vqvae_loss": self.quantization.result()}


@program("keras-io: Vector-Quantized Variational Autoencoders")
def vq_vae() -> Made:
    """Codes by the nearest vector, straight through, added losses read again after the update."""
    return Made(VqTrainer(0.1), {"optimizer": adam()}, fit(images()))


@program("keras-io: Vector-Quantized Variational Autoencoders")
def vq_vae_and_normalization() -> Made:
    """Added losses of a layer before BatchNormalization, read in the step and after it."""
    return Made(VqTrainer(0.1, layers.BatchNormalization()), {"optimizer": adam()}, fit(images()))


class MaskedAutoencoder(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = layers.Dense(4, "tanh")
        self.decoder = layers.Dense(3)
        self.mask_token = self.add_weight(shape=(3,), initializer="random_normal", name="token")
        self.seed_generator = keras.random.SeedGenerator(5)

    def call(self, patches: Any) -> Any:
        return self.decoder(self.encoder(patches))

    def _loss(self, patches: Any) -> Any:
        rows, count = ops.shape(patches)[0], patches.shape[1]
        order = ops.argsort(keras.random.uniform((rows, count), seed=self.seed_generator), axis=-1)
        hidden = ops.expand_dims(ops.cast(order < 2, patches.dtype), -1)
        rebuilt = self(patches * (1 - hidden) + self.mask_token * hidden)
        wrong = ops.mean(ops.square(rebuilt - patches), -1, keepdims=True) * hidden
        return ops.sum(wrong) / ops.cast(2 * rows, wrong.dtype)

    def train_step(self, patches: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self._loss(patches)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@program("keras-io: Masked image modeling with Autoencoders")
def masked_autoencoder() -> Made:
    """Patches are hidden by an argsort of draws; the loss is a mean over the hidden ones."""
    return Made(MaskedAutoencoder(), {"optimizer": adam()}, fit(batches(features(5, 3))))


class Coupling(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(4, "tanh", kernel_regularizer="l2")
        self.scale, self.shift = layers.Dense(2, "tanh"), layers.Dense(2)

    def call(self, x: Any) -> Any:
        hidden = self.hidden(x)
        return self.scale(hidden), self.shift(hidden)


class Flow(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.masks = np.array([[0, 1], [1, 0]], "float32")
        self.couplings = [Coupling() for _ in range(2)]
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.loss_tracker]

    def call(self, x: Any, training: bool = True) -> Any:
        logarithm = 0.0
        for mask, coupling in zip(self.masks, self.couplings, strict=True):
            kept = x * mask
            scale, shift = coupling(kept)
            scale, shift = scale * (1 - mask), shift * (1 - mask)
            x = (1 - mask) * (x * tf.exp(-scale) - shift * tf.exp(-scale)) + kept
            logarithm -= tf.reduce_sum(scale, [1])
        return x, logarithm

    def _log_loss(self, x: Any) -> Any:
        y, logarithm = self(x)
        return -tf.reduce_mean(-0.5 * tf.reduce_sum(y**2, 1) + logarithm)

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self._log_loss(data)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data: Any) -> Any:
        self.loss_tracker.update_state(self._log_loss(data))
        return {"loss": self.loss_tracker.result()}


@program("keras-io: Density estimation using Real NVP")
def normalizing_flow() -> Made:
    """A subclassed flow that is first built in its train_step; validation by a test_step."""
    return Made(
        Flow(),
        {"optimizer": adam()},
        fit(features(2), validation_split=0.2),
    )


@program(
    "keras-io: Convolutional autoencoder for image denoising",
    "keras-io: Timeseries anomaly detection using an Autoencoder",
)
def denoising_autoencoder() -> Made:
    """Noise drawn by a layer, images as targets, Adam."""
    model = keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 1)),
            layers.GaussianNoise(0.2),
            layers.Conv2D(2, 3, activation="relu", padding="same"),
            layers.MaxPooling2D(2, padding="same"),
            layers.Conv2DTranspose(2, 3, strides=2, activation="relu", padding="same"),
            layers.Conv2D(1, 3, activation="sigmoid", padding="same"),
        ]
    )
    x = images()
    return Made(
        model, {"optimizer": "adam", "loss": "binary_crossentropy"}, fit(x, x), predict={"x": x}
    )

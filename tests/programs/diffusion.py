"""Diffusion programs: noise and times drawn in the step, averaged weights, kernels over a batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.programs.common import adam, batches, features, fit
from tests.programs.registry import EQUAL, Made, program

WIDTH = 4


def _network() -> keras.Model:
    noisy, rate = keras.Input((WIDTH,)), keras.Input((1,))
    hidden = layers.Dense(4, "tanh")(layers.concatenate([noisy, rate]))
    return keras.Model([noisy, rate], layers.Dense(WIDTH)(hidden))


class Kernel(keras.metrics.Metric):
    """The mean of a kernel over all pairs of rows of a batch, averaged over batches."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.tracker = keras.metrics.Mean(name="tracker")

    def update_state(self, real: Any, made: Any, sample_weight: Any = None) -> None:
        kernel = (real @ ops.transpose(made) / WIDTH + 1.0) ** 3.0
        self.tracker.update_state(ops.mean(kernel))

    def result(self) -> Any:
        return self.tracker.result()

    def reset_state(self) -> None:
        self.tracker.reset_state()


class Ddim(keras.Model):
    kernel = False

    def __init__(self) -> None:
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = _network()
        self.ema_network = keras.models.clone_model(self.network)

    def compile(self, **options: Any) -> None:
        super().compile(**options)
        self.noise_tracker = keras.metrics.Mean(name="n_loss")
        self.image_tracker = keras.metrics.Mean(name="i_loss")
        self.kid = Kernel(name="kid")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.noise_tracker, self.image_tracker, self.kid]

    def _denoise(self, images: Any, training: bool) -> Any:
        images = self.normalizer(images, training=training)
        rows = ops.shape(images)[0]
        noise = keras.random.normal((rows, WIDTH))
        angle = keras.random.uniform((rows, 1), minval=0.1, maxval=1.4)
        noise_rate, signal_rate = ops.sin(angle), ops.cos(angle)
        noisy = signal_rate * images + noise_rate * noise
        network = self.network if training else self.ema_network
        found = network([noisy, noise_rate**2], training=training)
        rebuilt = (noisy - noise_rate * found) / signal_rate
        return self.loss(noise, found), self.loss(images, rebuilt), rebuilt

    def train_step(self, images: Any) -> Any:
        with tf.GradientTape() as tape:
            noise_loss, image_loss, _ = self._denoise(images, training=True)
        weights = self.network.trainable_weights
        self.optimizer.apply_gradients(
            zip(tape.gradient(noise_loss, weights), weights, strict=True)
        )
        self.noise_tracker.update_state(noise_loss)
        self.image_tracker.update_state(image_loss)
        for weight, average in zip(self.network.weights, self.ema_network.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return {m.name: m.result() for m in self.metrics[:-1]}

    def test_step(self, images: Any) -> Any:
        noise_loss, image_loss, rebuilt = self._denoise(images, training=False)
        self.noise_tracker.update_state(noise_loss)
        self.image_tracker.update_state(image_loss)
        if self.kernel:
            self.kid.update_state(images, rebuilt)
        return {m.name: m.result() for m in (self.metrics if self.kernel else self.metrics[:-1])}


class DdimWithKernel(Ddim):
    kernel = True


def _ddim(cls: type[Ddim], loss: Any) -> Made:
    model, x = cls(), features(WIDTH)
    model.normalizer.adapt(x)
    data = batches(x)
    given = {"optimizer": keras.optimizers.AdamW(0.01, weight_decay=0.01), "loss": loss}
    return Made(model, given, fit(data, validation_data=data))


@program("keras-io: Denoising Diffusion Implicit Models")
def diffusion_with_averaged_weights() -> Made:
    """keras.random without a seed, a function of Keras as the loss of vectors, averaged weights."""
    return _ddim(Ddim, keras.losses.mean_absolute_error)


@program("keras-io: Denoising Diffusion Probabilistic Models")
def diffusion_with_a_loss_object() -> Made:
    """The same with the mean of a loss object."""
    return _ddim(Ddim, keras.losses.MeanSquaredError())


@program("keras-io: Denoising Diffusion Implicit Models")
def metric_of_pairs_of_rows() -> Made:
    """A metric of a kernel over all pairs of rows, updated in a test_step."""
    return _ddim(DdimWithKernel, keras.losses.MeanSquaredError())


class Ddpm(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.network, self.ema_network = _network(), _network()
        self.ema_network.set_weights(self.network.get_weights())
        self.rates = np.linspace(0.1, 0.9, 5).astype("float32")
        self.seed_generator = keras.random.SeedGenerator(9)

    def train_step(self, images: Any) -> Any:
        rows = tf.shape(images)[0]
        times = keras.random.randint((rows,), 0, 5, seed=self.seed_generator)
        rate = tf.reshape(tf.gather(self.rates, times), (rows, 1))
        with tf.GradientTape() as tape:
            noise = keras.random.normal(tf.shape(images), seed=self.seed_generator)
            found = self.network([(1 - rate) * images + rate * noise, rate], training=True)
            loss = self.loss(noise, found)
        weights = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        for weight, average in zip(self.network.weights, self.ema_network.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return {"loss": loss}


@program("keras-io: Denoising Diffusion Probabilistic Models", expects=EQUAL)
def diffusion_of_drawn_times() -> Made:
    """Whole numbers drawn for each row, gathered from a table; the loss itself as the log."""
    given = {"optimizer": adam(), "loss": keras.losses.MeanSquaredError()}
    return Made(Ddpm(), given, fit(features(WIDTH)))

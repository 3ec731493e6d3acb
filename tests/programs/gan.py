"""Adversarial programs: several networks, optimizers and tapes in one train_step."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.programs.common import BATCH, CLASSES, ROWS, adam, batches, features, fit, labels
from tests.programs.registry import TF_RANDOM, Made, program

LATENT, DATA = 2, 4
REAL = features(DATA)


def _generator(inputs: int = LATENT) -> keras.Model:
    return keras.Sequential(
        [keras.Input((inputs,)), layers.Dense(5, "tanh"), layers.Dense(DATA)], name="generator"
    )


def _discriminator(inputs: int = DATA, *extra: Any) -> keras.Model:
    return keras.Sequential(
        [keras.Input((inputs,)), layers.Dense(5), layers.LeakyReLU(), *extra, layers.Dense(1)],
        name="discriminator",
    )


def _apply(optimizer: Any, tape: Any, loss: Any, variables: Any) -> None:
    gradients = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(gradients, variables, strict=True))


class Gan(keras.Model):
    def __init__(self, discriminator: keras.Model, generator: keras.Model) -> None:
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.seed_generator = keras.random.SeedGenerator(1337)
        self.make_trackers()

    def make_trackers(self) -> None:
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real: Any) -> Any:
        rows = ops.shape(real)[0]
        latent = keras.random.normal((rows, LATENT), seed=self.seed_generator)
        combined = ops.concatenate([self.generator(latent), real], axis=0)
        targets = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(targets, self.discriminator(combined))
        _apply(self.d_optimizer, tape, d_loss, self.discriminator.trainable_weights)
        latent = keras.random.normal((rows, LATENT), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            predicted = self.discriminator(self.generator(latent))
            g_loss = self.loss_fn(ops.zeros((rows, 1)), predicted)
        _apply(self.g_optimizer, tape, g_loss, self.generator.trainable_weights)
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


class CompiledTrackers(Gan):
    """Trackers made by compile, and `metrics` that reads them."""

    def make_trackers(self) -> None:
        pass

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile(d_optimizer, g_optimizer, loss_fn)
        super().make_trackers()


class NoisyTargets(Gan):
    def train_step(self, real: Any) -> Any:
        rows = tf.shape(real)[0]
        fake = self.generator(tf.random.normal((rows, LATENT)))
        targets = tf.concat([tf.ones((rows, 1)), tf.zeros((rows, 1))], axis=0)
        targets += 0.05 * tf.random.uniform(tf.shape(targets))
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(targets, self.discriminator(tf.concat([fake, real], axis=0)))
        _apply(self.d_optimizer, tape, d_loss, self.discriminator.trainable_weights)
        return {"d_loss": d_loss}


class OneUpdate(Gan):
    def train_step(self, real: Any) -> Any:
        rows = tf.shape(real)[0]
        fake = self.generator(keras.random.normal((rows, LATENT), seed=self.seed_generator))
        combined = tf.concat([fake, real], axis=0)
        targets = tf.concat([tf.ones((rows, 1)), tf.zeros((rows, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(targets, self.discriminator(combined, training=True))
        _apply(self.d_optimizer, tape, d_loss, self.discriminator.trainable_weights)
        self.d_loss_metric.update_state(d_loss)
        return {"d_loss": self.d_loss_metric.result()}


def _gan(cls: type[Gan], *extra: Any) -> Made:
    return Made(
        cls(_discriminator(DATA, *extra), _generator()),
        {"d_optimizer": adam(), "g_optimizer": adam(0.02)}
        | {"loss_fn": keras.losses.BinaryCrossentropy(from_logits=True)},
        fit(batches(REAL)),
    )


@program(
    "keras-io: DCGAN to generate face images", "Keras guide: Customizing what happens in fit()"
)
def gan_with_trackers_made_by_compile() -> Made:
    """Two optimizers, real and generated rows joined; `metrics` reads what compile makes."""
    return _gan(CompiledTrackers)


@program(
    "Keras guide: Customizing what happens in fit()",
    "keras-io: Denoising Diffusion Probabilistic Models",
    expects=TF_RANDOM,
)
def draws_of_tf_random() -> Made:
    """A step that draws rows and noisy targets by TensorFlow's stateful tf.random."""
    return _gan(NoisyTargets)


@program("TensorFlow tutorial: DCGAN", "keras-io: GAN")
def gan_with_dropout_over_joined_rows() -> Made:
    """Dropout, of entries and of channels, and BatchNormalization over joined rows."""
    spatial = [layers.Reshape((5, 1)), layers.SpatialDropout1D(0.3), layers.Flatten()]
    return _gan(OneUpdate, layers.BatchNormalization(), layers.Dropout(0.3), *spatial)


class ConditionalGan(Gan):
    def train_step(self, data: Any) -> Any:
        real, kinds = data
        rows = ops.shape(real)[0]
        latent = keras.random.normal((rows, LATENT), seed=self.seed_generator)
        fake = self.generator(ops.concatenate([latent, kinds], axis=1))
        joined = ops.concatenate(
            [ops.concatenate([fake, kinds], -1), ops.concatenate([real, kinds], -1)], axis=0
        )
        targets = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(targets, self.discriminator(joined))
        _apply(self.d_optimizer, tape, d_loss, self.discriminator.trainable_weights)
        with tf.GradientTape() as tape:
            fake = self.generator(ops.concatenate([latent, kinds], axis=1))
            g_loss = self.loss_fn(
                ops.zeros((rows, 1)), self.discriminator(ops.concatenate([fake, kinds], -1))
            )
        _apply(self.g_optimizer, tape, g_loss, self.generator.trainable_weights)
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


@program("keras-io: Conditional GAN")
def conditional_gan() -> Made:
    """Targets of the data as inputs of both networks; the generator twice in a step."""
    kinds = np.eye(CLASSES, dtype="float32")[labels()]
    return Made(
        ConditionalGan(_discriminator(DATA + CLASSES), _generator(LATENT + CLASSES)),
        {"d_optimizer": adam(), "g_optimizer": adam()}
        | {"loss_fn": keras.losses.BinaryCrossentropy(from_logits=True)},
        fit(batches(REAL, kinds)),
    )


class WGan(keras.Model):
    def __init__(self, discriminator: keras.Model, generator: keras.Model) -> None:
        super().__init__()
        self.discriminator, self.generator, self.d_steps = discriminator, generator, 2
        self.seed_generator = keras.random.SeedGenerator(3)

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def _penalty(self, real: Any, fake: Any) -> Any:
        alpha = keras.random.uniform((tf.shape(real)[0], 1), seed=self.seed_generator)
        between = real + alpha * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            predicted = self.discriminator(between, training=True)
        slope = tape.gradient(predicted, [between])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(slope), axis=1))
        return tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(self, real: Any) -> Any:
        if isinstance(real, tuple):
            real = real[0]
        rows = tf.shape(real)[0]
        for _ in range(self.d_steps):
            latent = keras.random.normal((rows, LATENT), seed=self.seed_generator)
            with tf.GradientTape() as tape:
                fake = self.generator(latent, training=True)
                cost = tf.reduce_mean(self.discriminator(fake, training=True))
                cost -= tf.reduce_mean(self.discriminator(real, training=True))
                d_loss = cost + 10.0 * self._penalty(real, fake)
            _apply(self.d_optimizer, tape, d_loss, self.discriminator.trainable_variables)
        with tf.GradientTape() as tape:
            fake = self.generator(
                keras.random.normal((rows, LATENT), seed=self.seed_generator), training=True
            )
            g_loss = -tf.reduce_mean(self.discriminator(fake, training=True))
        _apply(self.g_optimizer, tape, g_loss, self.generator.trainable_variables)
        return {"d": d_loss, "g": g_loss}


@program("keras-io: WGAN-GP overriding Model.train_step")
def wgan_with_gradient_penalty() -> Made:
    """Several critic steps in one, a gradient by inputs in the loss, and plain values as logs."""
    return Made(
        WGan(_discriminator(), _generator()),
        {"d_optimizer": adam(), "g_optimizer": adam()},
        fit(REAL),
    )


class AdaptiveGan(Gan):
    """Keeps an average of the generator, and a probability that follows the predictions."""

    def __init__(self, discriminator: keras.Model, generator: keras.Model) -> None:
        super().__init__(discriminator, generator)
        self.ema_generator = keras.models.clone_model(generator)
        self.probability = tf.Variable(0.0, trainable=False)

    def train_step(self, real: Any) -> Any:
        rows = tf.shape(real)[0]
        with tf.GradientTape(persistent=True) as tape:
            fake = self.generator(
                keras.random.normal((rows, LATENT), seed=self.seed_generator), training=True
            )
            of_real, of_fake = self.discriminator(real), self.discriminator(fake)
            g_loss = self.loss_fn(tf.ones((rows, 1)), of_fake)
            d_loss = self.loss_fn(
                tf.concat([tf.ones((rows, 1)), tf.zeros((rows, 1))], 0),
                tf.concat([of_real, of_fake], 0),
            )
        _apply(self.g_optimizer, tape, g_loss, self.generator.trainable_weights)
        _apply(self.d_optimizer, tape, d_loss, self.discriminator.trainable_weights)
        sure = tf.reduce_mean(tf.sigmoid(of_real))
        self.probability.assign(0.9 * self.probability + 0.1 * sure)
        self.g_loss_metric.update_state(g_loss)
        self.d_loss_metric.update_state(d_loss)
        for weight, average in zip(self.generator.weights, self.ema_generator.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return {m.name: m.result() for m in self.metrics}


@program("keras-io: Data-efficient GANs with Adaptive Discriminator Augmentation")
def gan_with_an_adaptive_probability() -> Made:
    """A variable of the model that a step moves by a mean over rows; averaged weights."""
    made = _gan(AdaptiveGan)
    made.after = lambda model: {"probability": model.probability.numpy()}
    return made


class ConstantRows(Gan):
    def train_step(self, real: Any) -> Any:
        latent = keras.random.normal((BATCH, LATENT), seed=self.seed_generator)
        with tf.GradientTape(persistent=True) as tape:
            fake = self.generator(latent)
            g_loss = self.loss_fn(tf.ones((BATCH, 1)), self.discriminator(fake))
            d_loss = self.loss_fn(tf.ones((BATCH, 1)), self.discriminator(real)) + self.loss_fn(
                tf.zeros((BATCH, 1)), self.discriminator(fake)
            )
        _apply(self.g_optimizer, tape, g_loss, self.generator.trainable_weights)
        _apply(self.d_optimizer, tape, d_loss, self.discriminator.trainable_weights)
        return {"d": d_loss, "g": g_loss}


@program(
    "keras-io: Data-efficient GANs with Adaptive Discriminator Augmentation",
    "keras-io: GauGAN for conditional image generation",
    expects=r"(?i)\bbatch\b|shape|differ",
)
def batch_size_as_a_constant() -> Made:
    """A step that draws and labels as many rows as a constant says, whatever the batch has."""
    made = _gan(ConstantRows)
    made.fit = fit(batches(REAL[:BATCH]))
    return made


class GeneratorOfConstantRows(Gan):
    def train_step(self, real: Any) -> Any:
        latent = keras.random.normal((BATCH, LATENT), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            score = self.discriminator(self.generator(latent))
            g_loss = tf.reduce_mean(tf.nn.softplus(-score))
        _apply(self.g_optimizer, tape, g_loss, self.generator.trainable_weights)
        with tf.GradientTape() as tape:
            score, other = self.discriminator(self.generator(latent)), self.discriminator(real)
            d_loss = tf.reduce_mean(tf.nn.softplus(score)) + tf.reduce_mean(tf.nn.softplus(-other))
        _apply(self.d_optimizer, tape, d_loss, self.discriminator.trainable_weights)
        return {"d": d_loss, "g": g_loss}


@program("keras-io: GauGAN for conditional image generation")
def constant_number_of_generated_rows() -> Made:
    """A step that generates a constant number of rows besides the rows of the batch."""
    return _gan(GeneratorOfConstantRows)


class Cycle(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.gen_g, self.gen_f = (_small(DATA), _small(DATA))
        self.disc_x, self.disc_y = (_small(1), _small(1))

    def call(self, inputs: Any) -> Any:
        return self.disc_x(inputs), self.disc_y(inputs), self.gen_g(inputs), self.gen_f(inputs)

    def compile(self, gen_g: Any, gen_f: Any, disc_x: Any, disc_y: Any) -> None:
        super().compile()
        self.gen_g_optimizer, self.gen_f_optimizer = gen_g, gen_f
        self.disc_x_optimizer, self.disc_y_optimizer = disc_x, disc_y
        self.adversarial = keras.losses.MeanSquaredError()
        self.cycle = keras.losses.MeanAbsoluteError()

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            fake_y, fake_x = self.gen_g(x, training=True), self.gen_f(y, training=True)
            back_x, back_y = self.gen_f(fake_y, training=True), self.gen_g(fake_x, training=True)
            of_x, of_fake_x = self.disc_x(x), self.disc_x(fake_x)
            of_y, of_fake_y = self.disc_y(y), self.disc_y(fake_y)
            cycles = self.cycle(x, back_x) + self.cycle(y, back_y)
            g_loss = self.adversarial(tf.ones_like(of_fake_y), of_fake_y) + 10 * cycles
            f_loss = self.adversarial(tf.ones_like(of_fake_x), of_fake_x) + 10 * cycles
            x_loss = 0.5 * (
                self.adversarial(tf.ones_like(of_x), of_x)
                + self.adversarial(tf.zeros_like(of_fake_x), of_fake_x)
            )
            y_loss = 0.5 * (
                self.adversarial(tf.ones_like(of_y), of_y)
                + self.adversarial(tf.zeros_like(of_fake_y), of_fake_y)
            )
        _apply(self.gen_g_optimizer, tape, g_loss, self.gen_g.trainable_variables)
        _apply(self.gen_f_optimizer, tape, f_loss, self.gen_f.trainable_variables)
        _apply(self.disc_x_optimizer, tape, x_loss, self.disc_x.trainable_variables)
        _apply(self.disc_y_optimizer, tape, y_loss, self.disc_y.trainable_variables)
        return {"g": g_loss, "f": f_loss, "x": x_loss, "y": y_loss}


def _small(outputs: int) -> keras.Model:
    return keras.Sequential([keras.Input((DATA,)), layers.Dense(3, "tanh"), layers.Dense(outputs)])


@program("keras-io: CycleGAN", "TensorFlow tutorial: CycleGAN")
def four_optimizers_and_a_persistent_tape() -> Made:
    """Four networks, four optimizers, one persistent tape; nothing but plain values as logs."""
    return Made(
        Cycle(),
        {"gen_g": adam(), "gen_f": adam(), "disc_x": adam(), "disc_y": adam()},
        fit(tf.data.Dataset.zip((batches(REAL), batches(REAL[::-1] * 0.5 + 1)))),
    )


class TwoTapes(keras.Model):
    """Features of the critic are matched; the networks are variables of the function below."""

    def __init__(self, generator: keras.Model, critic: keras.Model) -> None:
        super().__init__()
        self.generator, self.critic = generator, critic
        self.hinge = keras.losses.Hinge()
        self.critic_optimizer: Any = None

    def compile(self, optimizer: Any, critic_optimizer: Any) -> None:
        super().compile(optimizer=optimizer)
        self.critic_optimizer = critic_optimizer

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape, tf.GradientTape() as critic_tape:
            made = self.generator(x, training=True)
            real, fake = self.critic(y), self.critic(made)
            matching = [
                tf.reduce_mean(tf.abs(a - b)) for a, b in zip(real[:-1], fake[:-1], strict=True)
            ]
            loss = -tf.reduce_mean(fake[-1]) + 10 * tf.reduce_mean(matching)
            critic_loss = self.hinge(1.0, real[-1]) + self.hinge(-1.0, fake[-1])
        _apply(self.optimizer, tape, loss, self.generator.trainable_weights)
        _apply(self.critic_optimizer, critic_tape, critic_loss, self.critic.trainable_weights)
        return {"loss": loss, "critic": critic_loss}


@program("keras-io: MelGAN-based spectrogram inversion using feature matching", "keras-io: GauGAN")
def two_tapes_and_feature_matching() -> Made:
    """Two tapes at once, features matched, a hinge loss of a constant target, clipped norms."""
    inputs = keras.Input((DATA,))
    hidden = layers.Dense(4, "tanh")(inputs)
    critic = keras.Model(inputs, [hidden, layers.Dense(1)(hidden)])
    return Made(
        TwoTapes(_small(DATA), critic),
        {
            "optimizer": keras.optimizers.Adam(0.01, clipnorm=0.1),
            "critic_optimizer": keras.optimizers.Adam(0.01, clipnorm=0.1),
        },
        fit(batches(REAL, REAL[::-1] * 0.5)),
    )


class MinibatchSpread(layers.Layer):
    def call(self, inputs: Any) -> Any:
        spread = ops.mean(ops.sqrt(ops.var(inputs, axis=0) + 1e-8))
        column = ops.ones((ops.shape(inputs)[0], 1)) * spread
        return ops.concatenate([inputs, column], axis=-1)


@program("keras-io: StyleGAN")
def minibatch_standard_deviation() -> Made:
    """A layer that joins to each row the standard deviation over all rows of the batch."""
    model = keras.Sequential(
        [keras.Input((DATA,)), layers.Dense(3, "tanh"), MinibatchSpread(), layers.Dense(1)]
    )
    return Made(model, {"optimizer": adam(), "loss": "mse"}, fit(REAL, features(1)))


class Growing(Gan):
    """Counts its steps in a variable, blends by it, and weighs a penalty by it."""

    def __init__(self, discriminator: keras.Model, generator: keras.Model) -> None:
        super().__init__(discriminator, generator)
        self.counter = tf.Variable(0, dtype=tf.int32, trainable=False)
        self.alpha = tf.Variable(1.0, trainable=False, dtype=tf.float32)

    def train_step(self, real: Any) -> Any:
        self.counter.assign_add(1)
        self.alpha.assign(tf.cast(self.counter / 4, tf.float32))
        rows = tf.shape(real)[0]
        latent = keras.random.normal((rows, LATENT), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            fake = self.alpha * self.generator(latent) + (1 - self.alpha) * real
            of_real, of_fake = self.discriminator(real), self.discriminator(fake)
            loss_real = tf.reduce_mean(tf.nn.softplus(-of_real))
            drift = 0.001 * tf.reduce_mean(tf.square(of_real))
            d_loss = loss_real + tf.reduce_mean(tf.nn.softplus(of_fake)) + drift
        _apply(self.d_optimizer, tape, d_loss, self.discriminator.trainable_weights)
        self.d_loss_metric.update_state(d_loss)
        return {"d_loss": d_loss, "drift": drift}


@program("keras-io: Face image generation with StyleGAN")
def steps_counted_by_the_model() -> Made:
    """Variables of the model that count the steps and blend generated with real rows."""
    made = _gan(Growing)
    made.after = lambda model: {"counter": model.counter.numpy(), "alpha": model.alpha.numpy()}
    assert ROWS > BATCH
    return made

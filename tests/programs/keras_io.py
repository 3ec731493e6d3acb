"""Kinds of steps, layers and data that only one or two of keras-io's examples have."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.programs.common import (
    BATCH,
    CLASSES,
    SPARSE,
    adam,
    batches,
    classifier,
    features,
    fit,
    images,
    labels,
    sgd,
    tokens,
)
from tests.programs.registry import TF_RANDOM, Made, program
from tests.programs.supervised import Step

# Sequences of sounds, and the shorter sequences of letters that they stand for. Class 0 is blank.
SOUNDS, LETTERS = features(8, 4), np.maximum(tokens(3, 5), 1)


def _ctc(y: Any, logits: Any) -> Any:
    """Returns the CTC loss of each row, `[rows, 1]`."""
    ones = ops.ones((ops.shape(logits)[0],), "int32")
    lengths = ones * ops.shape(y)[1], ones * ops.shape(logits)[1]
    return ops.expand_dims(ops.ctc_loss(ops.cast(y, "int32"), logits, *lengths), 1)


class CtcLayer(layers.Layer):
    """Adds the loss of each row, of which Keras takes the sum."""

    def call(self, y: Any, logits: Any) -> Any:
        self.add_loss(_ctc(y, logits))
        return logits


@program(
    "keras-io: OCR model for reading Captchas",
    "keras-io: Handwriting recognition",
)
def ctc_in_an_added_loss() -> Made:
    """A layer that adds a CTC loss with a value for each row, targets as an input."""
    sounds, letters = keras.Input((8, 4), name="sounds"), keras.Input((3,), name="letters")
    hidden = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(sounds)
    outputs = CtcLayer()(letters, layers.Dense(6)(hidden))
    model = keras.Model([sounds, letters], outputs)
    data = {"sounds": SOUNDS, "letters": LETTERS.astype("float32")}
    return Made(model, {"optimizer": adam()}, fit(data))


@program("keras-io: Automatic Speech Recognition using CTC")
def ctc_as_the_loss() -> Made:
    """A CTC loss of padded batches, a GRU after BatchNormalization, predictions by a callback."""
    inputs = keras.Input((None, 4))
    # A bias before the normalization has no effect, so Adam would divide rounding by rounding.
    hidden = layers.Conv1D(5, 3, padding="same", use_bias=False)(inputs)
    hidden = layers.BatchNormalization()(hidden)
    hidden = layers.Bidirectional(layers.GRU(4, return_sequences=True))(
        layers.Activation("tanh")(hidden)
    )
    model = keras.Model(inputs, layers.Dense(6)(hidden))
    data = tf.data.Dataset.from_tensor_slices((SOUNDS, LETTERS)).padded_batch(BATCH)
    decoded: list[Any] = []

    class Decodes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            decoded.append(self.model.predict(SOUNDS[:5], verbose=0))

    return Made(
        model,
        {"optimizer": adam(), "loss": _ctc},
        fit(data, callbacks=[Decodes()]),
        after=lambda model: {f"decoded/{i}": value for i, value in enumerate(decoded)},
    )


class ShufflesRows(Step):
    """Trains on each row and on another one of the batch, chosen at random."""

    def shuffled(self, x: Any) -> Any:
        return tf.random.shuffle(x, seed=3)

    def of(self, x: Any, y: Any) -> Any:
        apart = tf.square(self(x) - self(self.shuffled(x)))
        return tf.reduce_mean(self.compute_loss(y=y, y_pred=self(x))) - tf.reduce_mean(apart)


class ShufflesByKeras(ShufflesRows):
    def shuffled(self, x: Any) -> Any:
        return keras.random.shuffle(x, seed=3)


def _shuffling(cls: type[ShufflesRows]) -> Made:
    inputs = keras.Input((4,))
    model = cls(inputs, layers.Dense(CLASSES, "softmax")(inputs))
    return Made(model, {"optimizer": sgd(), "loss": SPARSE}, fit(features(4), labels()))


@program("keras-io: The Forward-Forward algorithm", expects=TF_RANDOM)
def rows_shuffled_by_tf_random() -> Made:
    """A step that compares each row with another row, which tf.random.shuffle chooses."""
    return _shuffling(ShufflesRows)


@program("Keras: keras.random.shuffle in a train_step", expects="differ")
def rows_shuffled_by_keras() -> Made:
    """A step that compares each row with another row, which keras.random.shuffle chooses."""
    return _shuffling(ShufflesByKeras)


class TrainsItself(layers.Layer):
    """A dense layer with an optimizer and a tape of its own, which updates several times."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.dense = layers.Dense(units)
        self.optimizer = keras.optimizers.Adam(0.03)
        self.loss_metric = keras.metrics.Mean()

    def call(self, x: Any) -> Any:
        norm = tf.norm(x, ord=2, axis=1, keepdims=True) + 1e-4
        return tf.nn.relu(self.dense(x / norm))

    def forward_forward(self, positive: Any, negative: Any) -> Any:
        for _ in range(3):
            with tf.GradientTape() as tape:
                good = tf.reduce_mean(tf.square(self.call(positive)), 1)
                bad = tf.reduce_mean(tf.square(self.call(negative)), 1)
                parts = tf.concat([1.5 - good, bad - 1.5], 0)
                loss = tf.reduce_mean(tf.math.log(1 + tf.math.exp(parts)))
            self.loss_metric.update_state([loss])
            weights = self.dense.trainable_weights
            gradients = tape.gradient(loss, weights)
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        found = [tf.stop_gradient(self.call(x)) for x in (positive, negative)]
        return *found, self.loss_metric.result()


class ForwardForward(keras.Model):
    """Trains its layers one after the other, and adds up their losses in a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [TrainsItself(6), TrainsItself(5)]
        self.total = self.add_weight(initializer="zeros", trainable=False, name="total")

    def call(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.total.assign(0.0)
        good = tf.concat([tf.one_hot(y, CLASSES), x], 1)
        bad = tf.concat([tf.one_hot((y + 1) % CLASSES, CLASSES), x], 1)
        for part in self.parts:
            good, bad, loss = part.forward_forward(good, bad)
            self.total.assign_add(loss)
        return {"final": self.total + 0.0}


@program("keras-io: The Forward-Forward algorithm")
def layers_that_train_themselves() -> Made:
    """Layers with tapes, optimizers and metrics of their own, each updated three times a step."""
    model = ForwardForward()
    model(np.zeros((2, 4 + CLASSES), "float32"))
    return Made(model, {"optimizer": sgd()}, fit(features(4), labels()))


class Bayesian(layers.Layer):
    """Draws its weights once a call, and adds their divergence from a normal distribution."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units, self.seeds = units, keras.random.SeedGenerator(5)

    def build(self, shape: Any) -> None:
        size = (shape[-1], self.units)
        self.mean = self.add_weight(shape=size, name="mean")
        self.scale = self.add_weight(shape=size, initializer="zeros", name="scale")

    def call(self, x: Any) -> Any:
        noise = keras.random.normal(ops.shape(self.mean), seed=self.seeds)
        deviation = ops.softplus(self.scale)
        divergence = (ops.square(deviation) + ops.square(self.mean)) / 2 - ops.log(deviation)
        self.add_loss(0.01 * ops.sum(divergence))
        return x @ (self.mean + deviation * noise)


@program("keras-io: Probabilistic Bayesian Neural Networks")
def weights_drawn_in_the_forward_pass() -> Made:
    """A layer that draws its weights in each call, with an added loss of the weights alone."""
    inputs = keras.Input((4,))
    outputs = layers.Dense(1)(layers.Activation("sigmoid")(Bayesian(5)(inputs)))
    model = keras.Model(inputs, outputs)
    x = features(4)
    return Made(model, {"optimizer": adam(), "loss": "mse"}, fit(x, x[:, :1]))


class KeepsTensors(layers.Layer):
    """A layer that keeps a tensor as an attribute, which the step reads after the call."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(5)
        self.modulator: Any = None

    def call(self, x: Any) -> Any:
        hidden = self.dense(x)
        gates = ops.softmax(hidden)
        self.modulator = gates * hidden
        return ops.tanh(self.modulator)


class ReadsTensors(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = KeepsTensors(), layers.Dense(CLASSES, "softmax")

    def call(self, x: Any) -> Any:
        return self.last(self.first(x))

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.batch_size = tf.shape(x)[0]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            loss += 0.1 * tf.reduce_mean(tf.abs(self.first.modulator))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"own_loss": loss, "rows": self.counted()}

    def counted(self) -> Any:
        return tf.cast(self.batch_size, tf.float32)


@program(
    "keras-io: Focal Modulation: A replacement for Self-Attention",
    "keras-io: WGAN-GP with R-GCN for the generation of small molecular graphs",
    "keras-io: Drug Molecule Generation with VAE",
)
def tensors_kept_as_attributes() -> Made:
    """Tensors that a layer and a step keep as attributes, and other methods read."""
    return Made(ReadsTensors(), {"optimizer": adam(), "loss": SPARSE}, fit(features(4), labels()))


class OfImages(Step):
    """A loss of likeness between images, and of their edges, weighted by means of the batch."""

    def of(self, x: Any, y: Any) -> Any:
        found = self(x, training=True)
        likeness = 1 - tf.reduce_mean(tf.image.ssim(y, found, 1.0, filter_size=3))
        (down, right), (y_down, y_right) = map(tf.image.image_gradients, (found, y))
        weight = tf.exp(tf.reduce_mean(tf.abs(y_down)))
        edges = tf.reduce_mean(tf.abs(down * weight)) + tf.reduce_mean(tf.abs(right - y_right))
        return 0.85 * likeness + 0.9 * edges + tf.reduce_mean(tf.abs(y - found))


@program("keras-io: Monocular depth estimation", "keras-io: BASNet for segmentation")
def likeness_of_images() -> Made:
    """Structural similarity and edges of images, and the exponential of a mean as a factor."""
    inputs = keras.Input((6, 6, 1))
    model = OfImages(inputs, layers.Conv2D(1, 3, padding="same", activation="sigmoid")(inputs))
    return Made(model, {"optimizer": adam()}, fit(images(), images()[::-1]))


@program("keras-io: Vocal Track Separation with Encoder-Decoder Architecture")
def gradients_accumulated_by_keras() -> Made:
    """An optimizer that adds up the gradients of two steps, and a loss of spectra within a row."""

    def loss(y: Any, found: Any) -> Any:
        parts = [tf.signal.stft(tf.cast(v, tf.float32), 4, 2) for v in (y, found)]
        return tf.reduce_mean(tf.abs(parts[0] - parts[1]), (1, 2))

    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Dense(8)(layers.Dense(5, "tanh")(inputs)))
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    x = features(8)
    return Made(model, {"optimizer": optimizer, "loss": loss}, fit(x, x[::-1], epochs=3))


class CountsItsCalls(keras.utils.PyDataset):
    """Changes an attribute in each call, and draws by a generator for the index."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        rows = slice(10 * index, 10 * index + 10)
        noise = np.random.default_rng(index).standard_normal((10, 4)).astype("float32")
        self.calls += 1
        return features(4)[rows] + noise, labels()[rows]


@program("keras-io: Monocular depth estimation")
def pydataset_that_counts() -> Made:
    """A PyDataset that changes an attribute in each call, and draws by the index."""
    return Made(classifier(), {"optimizer": sgd(), "loss": SPARSE}, fit(CountsItsCalls(), epochs=2))


@program(
    "keras-io: 3D volumetric rendering with NeRF",
    "keras-io: Image classification with Swin Transformers",
)
def stateful_draws_in_map() -> Made:
    """Stateful draws of TensorFlow in a Dataset.map without parallel calls."""

    def noisy(x: Any, y: Any) -> Any:
        return x + tf.random.normal(tf.shape(x), seed=4), y

    data = tf.data.Dataset.from_tensor_slices((features(4), labels())).map(noisy).batch(BATCH)
    return Made(classifier(), {"optimizer": sgd(), "loss": SPARSE}, fit(data))


@program("keras-io: Focal Modulation: A replacement for Self-Attention")
def layers_in_map() -> Made:
    """Random layers of Keras with seeds in a Dataset.map."""
    flip, turn = layers.RandomFlip(seed=3), layers.RandomRotation(0.1, seed=4)
    data = batches(images(), labels()).map(lambda x, y: (turn(flip(x)), y))
    inputs = keras.Input((6, 6, 1))
    outputs = layers.Dense(CLASSES, "softmax")(layers.Flatten()(inputs))
    return Made(keras.Model(inputs, outputs), {"optimizer": sgd(), "loss": SPARSE}, fit(data))


class ConstantRows(Step):
    """Folds rays of images into the rows, with the number of rows written as a constant."""

    def of(self, x: Any, y: Any) -> Any:
        rays = tf.reshape(x, (10 * 3, 4))
        found = tf.reshape(self(rays), (10, 3, 1))
        return tf.reduce_mean(tf.square(tf.reduce_sum(found, (1, 2)) - y))


@program("keras-io: 3D volumetric rendering with NeRF", expects="(?i)reshape|differ|shape")
def reshaped_to_a_constant_number_of_rows() -> Made:
    """A step that reshapes to a batch size written as a constant, which no replica has."""
    inputs = keras.Input((4,))
    model = ConstantRows(inputs, layers.Dense(1)(inputs))
    return Made(model, {"optimizer": sgd()}, fit(features(3, 4), features(1)[:, 0], batch_size=10))


@program(
    "keras-io: Handwriting recognition",
    "keras-io: 3D volumetric rendering with NeRF",
)
def callback_with_another_model() -> Made:
    """A callback that predicts by a second model, which shares layers and is not compiled."""
    model = classifier(layers.BatchNormalization())
    inner = keras.Model(model.inputs, model.layers[0].output)
    seen: list[Any] = []

    class Predicts(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(np.asarray(inner.predict(features(4)[:5], verbose=0)))

    return Made(
        model,
        {"optimizer": adam(), "loss": SPARSE},
        fit(features(4), labels(), callbacks=[Predicts()]),
        after=lambda model: {f"seen/{i}": value for i, value in enumerate(seen)},
    )


@program("keras-io: Review Classification using Active Learning")
def loaded_between_fits() -> Made:
    """Several fits of growing data with one ModelCheckpoint; the best file is loaded between."""
    x, y = features(4), labels()
    file = Path(tempfile.mkdtemp()) / "best.keras"

    def use(model: keras.Model) -> dict[str, Any]:
        saver = keras.callbacks.ModelCheckpoint(file, monitor="loss", save_best_only=True)
        found = {}
        for rows in (16, 24, 30):
            given = fit(x[:rows], y[:rows], callbacks=[saver])
            found[f"loss/{rows}"] = model.fit(**given, verbose=0).history["loss"]
            if file.exists():  # of several workers one saves
                found[f"sum/{rows}"] = sum(
                    float(np.abs(w).sum()) for w in keras.models.load_model(file).get_weights()
                )
            with model.distribute_strategy.scope():
                model.compile(adam(), SPARSE)
        return {key: value for key, value in found.items() if key.startswith("loss")}

    return Made(classifier(), {"optimizer": adam(), "loss": SPARSE}, use=use)


class ByCompiledMetrics(keras.Model):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            found = self(x, training=True)
            loss = self.compiled_loss(y, found)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.compiled_metrics.update_state(y, found)
        return {"own_loss": loss, **{m.name: m.result() for m in self.metrics}}


@program(
    "keras-io: Distilling Vision Transformers",
    "keras-io: Augmenting convnets with aggregated attention",
)
def deprecated_losses_and_metrics() -> Made:
    """A step that calls compiled_loss and compiled_metrics, which Keras 3 still has."""
    inputs = keras.Input((4,))
    model = ByCompiledMetrics(inputs, layers.Dense(CLASSES, "softmax")(inputs))
    compiled = {"optimizer": adam(), "loss": SPARSE, "metrics": ["accuracy"]}
    return Made(model, compiled, fit(features(4), labels()))


class ComputesByParts(keras.Model):
    """Selects parts of each row by draws, and has a compute_loss with arguments of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seeds = keras.random.SeedGenerator(7)

    def compute_loss(self, tokens: Any, chosen: Any) -> Any:  # type: ignore[override]
        found = self(tokens, training=True)
        apart = tf.gather(found - tokens, chosen, axis=1, batch_dims=1)
        return tf.reduce_mean(tf.square(apart))

    def train_step(self, data: Any) -> Any:
        order = tf.argsort(keras.random.uniform(tf.shape(data)[:2], seed=self.seeds), axis=1)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(data, order[:, :2])
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"own_loss": loss}


@program("keras-io: Image-based joint-embedding predictive architecture (I-JEPA)")
def parts_of_rows_by_gather() -> Made:
    """A compute_loss with arguments of its own, of parts that draws choose within each row."""
    inputs = keras.Input((5, 4))
    model = ComputesByParts(inputs, layers.Dense(4)(layers.Dense(6, "tanh")(inputs)))
    return Made(model, {"optimizer": adam()}, fit(features(5, 4)))


class OneForAllRows(layers.Layer):
    """Attention of a learned array, the same for all rows, and of all rows by a constant mask."""

    def __init__(self) -> None:
        super().__init__()
        learned, data = keras.Input((3, 4), batch_size=1), keras.Input((5, 4))
        # The softmax removes a number that is the same for all keys, such as a bias of them.
        keys = layers.Dense(4, use_bias=False)(data)
        scores = ops.matmul(layers.Dense(4)(learned), ops.transpose(keys, (0, 2, 1)))
        mixed = ops.matmul(ops.softmax(scores), data)
        self.cross = keras.Model([learned, data], layers.LayerNormalization()(mixed))
        self.attention = layers.MultiHeadAttention(2, 2, use_bias=False)
        self.mask = tf.constant(np.tri(3, dtype=bool)[None])

    def build(self, shape: Any) -> None:
        self.learned = self.add_weight(shape=(3, 4), name="learned")

    def call(self, x: Any) -> Any:
        found = self.cross([ops.expand_dims(self.learned, 0), x])
        return self.attention(found, found, attention_mask=self.mask)


@program(
    "keras-io: Image classification with Perceiver",
    "keras-io: Train a Vision Transformer on small datasets",
)
def arrays_of_one_row() -> Made:
    """A weight with one row as the input of an inner model, and a mask with one row."""
    inputs = keras.Input((5, 4))
    outputs = layers.Dense(CLASSES, "softmax")(layers.Flatten()(OneForAllRows()(inputs)))
    optimizer = keras.optimizers.Lamb(0.01)
    return Made(
        keras.Model(inputs, outputs),
        {"optimizer": optimizer, "loss": SPARSE},
        fit(features(5, 4), labels()),
    )


class PenaltyOfTwoInputs(Step):
    """A penalty of the gradient by two inputs at once, through dropout."""

    def of(self, nodes: Any, edges: Any) -> Any:
        with tf.GradientTape() as inner:
            inner.watch([nodes, edges])
            scores = self([nodes, edges], training=True)
        by_nodes, by_edges = inner.gradient(scores, [nodes, edges])
        norms = tf.norm(by_nodes, axis=-1) + tf.reduce_mean(tf.norm(by_edges, axis=-1), -1)
        return tf.reduce_mean(scores) + 10.0 * tf.reduce_mean(tf.square(1 - norms))


@program(
    "keras-io: WGAN-GP with R-GCN for the generation of small molecular graphs",
    "keras-io: Drug Molecule Generation with VAE",
)
def penalty_of_two_inputs() -> Made:
    """A penalty of the gradients by two inputs, through a seeded dropout and a second batch."""
    nodes, edges = keras.Input((4,)), keras.Input((3, 4))
    hidden = layers.Dense(6, "tanh")(nodes) + layers.Dense(6, "tanh")(layers.Flatten()(edges))
    model = PenaltyOfTwoInputs([nodes, edges], layers.Dense(1)(layers.Dropout(0.3, seed=6)(hidden)))
    return Made(model, {"optimizer": adam()}, fit(batches(features(4), features(3, 4))))


class CountsExperts(layers.Layer):
    """Sends each row to one of three experts, and keeps losses of how the rows are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = layers.Dense(3)
        self.experts = [layers.Dense(5, "relu") for _ in range(3)]
        self.balance: Any = None
        self.overflow: Any = None

    def call(self, x: Any) -> Any:
        chances = ops.softmax(self.gate(x))
        chosen = ops.argmax(chances, -1)
        ones = tf.ones_like(chosen, tf.float32)
        counts = tf.tensor_scatter_nd_add(tf.zeros(3), chosen[:, None], ones)
        self.balance = tf.reduce_sum(tf.square(tf.reduce_mean(chances, 0)))
        capacity = tf.reduce_sum(counts) / 3.0
        self.overflow = tf.reduce_sum(tf.nn.relu(counts - capacity)) / tf.reduce_sum(counts)
        found = tf.stack([expert(x) for expert in self.experts], 1)
        return tf.gather(found, chosen, axis=1, batch_dims=1) * tf.reduce_max(
            chances, -1, keepdims=True
        )


class OfExperts(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.mixture, self.last = CountsExperts(), layers.Dense(CLASSES, "softmax")

    def call(self, x: Any) -> Any:
        return self.last(self.mixture(x))

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            loss += 0.5 * self.mixture.balance + 0.1 * self.mixture.overflow
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"own_loss": loss, "overflow": self.mixture.overflow}


@program("mixture of experts: balanced loads and capacities")
def rows_counted_for_experts() -> Made:
    """Numbers of rows for each expert, whose excess over a capacity is part of the loss."""
    return Made(OfExperts(), {"optimizer": adam(), "loss": SPARSE}, fit(features(4), labels()))


class Scaled(layers.Layer):
    """Multiplies by a `tf.Variable`, which Keras does not count among the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = tf.Variable(tf.ones(4))

    def call(self, x: Any) -> Any:
        return x * self.scale


class TrainsTheScale(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.last = Scaled(), layers.Dense(CLASSES, "softmax")

    def call(self, x: Any) -> Any:
        return self.last(self.scaled(x))

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        weights, scale = self.trainable_variables, self.scaled.scale
        *gradients, of_scale = tape.gradient(loss, [*(w.value for w in weights), scale])
        self.optimizer.apply(gradients, weights)
        scale.assign_sub(0.3 * of_scale)
        return {"own_loss": loss, "scale": tf.reduce_sum(scale)}


@program("a layer with a trained tf.Variable")
def variable_trained_by_the_step() -> Made:
    """A `tf.Variable` of a layer that the step trains by itself."""
    return Made(TrainsTheScale(), {"optimizer": sgd(), "loss": SPARSE}, fit(features(4), labels()))


class MakesLayers(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(6), layers.Dense(CLASSES, "softmax")

    def call(self, x: Any) -> Any:
        hidden = layers.LeakyReLU()(self.first(layers.Flatten()(x)))
        return self.last(layers.Concatenate()([hidden, layers.Rescaling(0.5)(hidden)]))

    def predict(self, x: Any, **options: Any) -> Any:
        return np.log(super().predict(x, **options))


@program("layers made in call, and a predict of the model's own")
def layers_made_in_call() -> Made:
    """Layers without weights that each call makes anew; a `predict` that changes the outputs."""
    options = {"optimizer": adam(), "loss": SPARSE}
    return Made(MakesLayers(), options, fit(images(), labels()), predict={"x": images()})


class WritesEntries(keras.Model):
    """Keeps the last mean outputs in a variable, and draws the outputs towards them."""

    def __init__(self) -> None:
        super().__init__()
        self.last = layers.Dense(CLASSES, "softmax")
        self.bank = tf.Variable(tf.zeros((4, CLASSES)), trainable=False)
        self.counts = tf.Variable(tf.zeros(CLASSES), trainable=False)

    def call(self, x: Any) -> Any:
        return self.last(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            far = tf.square(outputs - tf.reduce_mean(self.bank, 0))
            loss = self.compute_loss(y=y, y_pred=outputs) + tf.reduce_mean(far)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        step, mean = self.optimizer.iterations.value, tf.reduce_mean(outputs, 0)
        self.bank[step % 4].assign(mean)
        tf.cond(step > 2, lambda: self.bank[0, 1:].assign(mean[1:]) + 0.0, lambda: self.bank + 0.0)
        ones = tf.ones_like(y, tf.float32)
        self.counts.scatter_nd_add(tf.cast(y, tf.int32)[:, None], ones)
        self.counts.scatter_max(tf.IndexedSlices(tf.reduce_max(outputs)[None] * 9.0, [2]))
        return {"own_loss": loss, "bank": tf.reduce_sum(self.bank), "count": self.counts[1]}


@program("a memory bank in a tf.Variable, written entry by entry")
def entries_written_by_the_step() -> Made:
    """Entries of a `tf.Variable` that a step writes by slices, indices and rows."""
    return Made(WritesEntries(), {"optimizer": sgd(), "loss": SPARSE}, fit(features(4), labels()))

"""Contrastive and metric learning: pairs, triplets, and losses over all rows of a batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.programs.common import adam, batches, features, fit, images, labels, sgd
from tests.programs.registry import Made, program

WIDTH = 4


def _embedding(*extra: Any, outputs: int = 3) -> keras.Model:
    inputs = keras.Input((WIDTH,))
    hidden = layers.Dense(4, "tanh")(inputs)
    for layer in extra:
        hidden = layer(hidden)
    # A bias that distances and correlations do not see would have rounding for a gradient.
    return keras.Model(inputs, layers.Dense(outputs, use_bias=False)(hidden))


class Own(keras.Model):
    """A model whose subclass says what its loss is of a batch."""

    def __init__(self, network: keras.Model) -> None:
        super().__init__()
        self.network = network
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.loss_tracker]

    def of(self, data: Any) -> Any:
        raise NotImplementedError

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.of(data)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data: Any) -> Any:
        self.loss_tracker.update_state(self.of(data))
        return {"loss": self.loss_tracker.result()}


def _cross(a: Any, b: Any) -> Any:
    a, b = tf.math.l2_normalize(a, 1), tf.math.l2_normalize(b, 1)
    return tf.matmul(a, b, transpose_b=True) / 0.5


class SimClr(Own):
    def of(self, data: Any) -> Any:
        first, second = data
        likeness = _cross(self.network(first), self.network(second))
        targets = tf.range(tf.shape(likeness)[0])
        entropy = keras.losses.sparse_categorical_crossentropy
        return (
            entropy(targets, likeness, from_logits=True)
            + entropy(targets, tf.transpose(likeness), from_logits=True)
        ) / 2


PAIRS = (features(WIDTH), features(WIDTH) + 0.1 * features(WIDTH)[::-1])


@program(
    "keras-io: Semi-supervised image classification using contrastive pretraining with SimCLR",
    "keras-io: Semantic Image Clustering",
)
def loss_of_all_pairs_in_the_step() -> Made:
    """A train_step whose loss compares each row with all rows of the batch."""
    return Made(SimClr(_embedding()), {"optimizer": adam()}, fit(batches(*PAIRS)))


class BarlowTwins(Own):
    def of(self, data: Any) -> Any:
        a, b = (self.network(part) for part in data)
        a = (a - tf.reduce_mean(a, 0)) / tf.math.reduce_std(a, 0)
        b = (b - tf.reduce_mean(b, 0)) / tf.math.reduce_std(b, 0)
        correlation = tf.matmul(a, b, transpose_a=True) / tf.cast(tf.shape(a)[0], tf.float32)
        return tf.reduce_sum((correlation - tf.eye(3)) ** 2)


@program("keras-io: Barlow Twins for Contrastive SSL")
def correlation_over_the_batch() -> Made:
    """A train_step whose loss is of correlations over the rows."""
    return Made(BarlowTwins(_embedding()), {"optimizer": adam()}, fit(batches(*PAIRS)))


class BarlowTwinsOfFullBatches(BarlowTwins):
    def of(self, data: Any) -> Any:
        a, b = (self.network(part) for part in data)
        rows = tf.shape(a, out_type=tf.float32)[0]
        return tf.reduce_sum((tf.matmul(a, b, transpose_a=True) / rows - tf.eye(3)) ** 2)


@program("keras-io: Self-supervised contrastive learning with NNCLR")
def rows_counted_in_floats() -> Made:
    """A train_step that asks tf.shape for floats, which takes a number of rows known before."""
    data = tf.data.Dataset.from_tensor_slices(PAIRS).batch(16, drop_remainder=True)
    return Made(BarlowTwinsOfFullBatches(_embedding()), {"optimizer": adam()}, fit(data))


class RandomCrops(layers.Layer):
    """Crops each image to a box of its own, and changes its brightness."""

    def call(self, x: Any) -> Any:
        rows = tf.shape(x)[0]
        sizes = keras.random.uniform((rows,), 0.5, 1.0)
        begin = keras.random.uniform((rows,), 0, 1 - sizes)
        boxes = tf.stack([begin, begin, begin + sizes, begin + sizes], axis=1)
        x = tf.image.crop_and_resize(x, boxes, tf.range(rows), (2, 2))
        return x * keras.random.uniform((tf.shape(x)[0], 1, 1, 1), 0.5, 1.5)


class SimClrOfCrops(SimClr):
    def __init__(self, network: keras.Model) -> None:
        super().__init__(network)
        self.crops = keras.Sequential([RandomCrops(), layers.Flatten()])

    def of(self, data: Any) -> Any:
        both = tf.concat(data, axis=0)
        return super().of((self.crops(both), self.crops(both)))


@program("keras-io: Self-supervised contrastive learning with NNCLR")
def joined_images_cropped_at_random() -> Made:
    """Two batches of images joined, each image cropped to a random box of its own."""
    data = batches(images(), images()[::-1])
    return Made(SimClrOfCrops(_embedding()), {"optimizer": adam()}, fit(data))


class Queue(Own):
    """Positive examples are the nearest of a queue, which each batch replaces in part."""

    def __init__(self, network: keras.Model) -> None:
        super().__init__(network)
        start = tf.math.l2_normalize(np.random.default_rng(3).standard_normal((40, 3)), 1)
        self.queue = tf.Variable(tf.cast(start, tf.float32), trainable=False)

    def of(self, data: Any) -> Any:
        first, second = (tf.math.l2_normalize(self.network(part), 1) for part in data)
        nearest = tf.argmax(tf.matmul(first, self.queue, transpose_b=True), axis=1)
        support = first + tf.stop_gradient(tf.gather(self.queue, nearest) - first)
        loss = -tf.reduce_mean(tf.reduce_sum(support * second, 1))
        self.queue.assign(tf.concat([first, self.queue[: -tf.shape(first)[0]]], axis=0))
        return loss


@program("keras-io: Self-supervised contrastive learning with NNCLR")
def queue_of_embeddings() -> Made:
    """A variable that holds the rows of the last batches."""
    made = Made(Queue(_embedding()), {"optimizer": adam()}, fit(batches(*PAIRS)))
    made.after = lambda model: {"queue": model.queue.numpy()}
    return made


class SimSiam(Own):
    def __init__(self, network: keras.Model) -> None:
        super().__init__(network)
        inputs = keras.Input((3,))
        self.predictor = keras.Model(inputs, layers.Dense(3)(inputs))

    def of(self, data: Any) -> Any:
        z = [self.network(part, training=True) for part in data]
        p = [self.predictor(part) for part in z]
        return self.distance(p[0], z[1]) / 2 + self.distance(p[1], z[0]) / 2

    def distance(self, p: Any, z: Any) -> Any:
        z = tf.math.l2_normalize(tf.stop_gradient(z), axis=1)
        return -tf.reduce_mean(tf.reduce_sum(tf.math.l2_normalize(p, axis=1) * z, axis=1))


class VectorSimSiam(SimSiam):
    def distance(self, p: Any, z: Any) -> Any:
        return keras.losses.cosine_similarity(tf.stop_gradient(z), p)


def _decaying() -> keras.optimizers.Optimizer:
    schedule = keras.optimizers.schedules.CosineDecay(0.03, decay_steps=6)
    return keras.optimizers.SGD(schedule, momentum=0.6)


@program("keras-io: Self-supervised contrastive learning with SimSiam")
def two_views_and_a_stopped_gradient() -> Made:
    """Two views of each row, a stopped gradient, BatchNormalization, a decaying rate."""
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=1, restore_best_weights=True)
    return Made(
        SimSiam(_embedding(layers.BatchNormalization())),
        {"optimizer": _decaying()},
        fit(batches(*PAIRS), callbacks=[stop]),
    )


@program("keras-io: Self-supervised contrastive learning with SimSiam")
def two_views_and_a_vector_loss() -> Made:
    """The same with a value of the loss for each row."""
    return Made(VectorSimSiam(_embedding()), {"optimizer": _decaying()}, fit(batches(*PAIRS)))


class Triplet(Own):
    def call(self, inputs: Any) -> Any:
        return self.network(inputs)

    def of(self, data: Any) -> Any:
        near, far = self.network(data)
        return tf.maximum(near - far + 0.5, 0.0)


def _distances() -> keras.Model:
    network = _embedding()
    inputs = [keras.Input((WIDTH,), name=name) for name in ("anchor", "positive", "negative")]
    a, p, n = (network(one) for one in inputs)
    near, far = ops.sum(ops.square(a - p), -1), ops.sum(ops.square(a - n), -1)
    return keras.Model(inputs, [near, far])


@program("keras-io: Image similarity estimation using a Siamese Network with a triplet loss")
def triplets() -> Made:
    """A batch of three inputs without targets, and a value of the loss for each row."""
    data = batches(*PAIRS, features(WIDTH)[::-1])
    return Made(Triplet(_distances()), {"optimizer": adam()}, fit(data, validation_data=data))


def _contrastive(y_true: Any, y_pred: Any) -> Any:
    near, far = ops.square(y_pred), ops.square(ops.maximum(1.0 - y_pred, 0))
    return ops.mean((1 - y_true) * near + y_true * far)


@program("keras-io: Image similarity estimation using a Siamese Network with a contrastive loss")
def siamese_with_a_loss_function_of_one_number() -> Made:
    """A shared network on two inputs, BatchNormalization of distances, a loss of one number."""
    network = _embedding(layers.BatchNormalization())
    first, second = keras.Input((WIDTH,)), keras.Input((WIDTH,))
    apart = ops.sqrt(
        ops.maximum(ops.sum(ops.square(network(first) - network(second)), 1, keepdims=True), 1e-7)
    )
    hidden = layers.BatchNormalization()(apart)
    model = keras.Model([first, second], layers.Dense(1, "sigmoid")(hidden))
    given = {"optimizer": "rmsprop", "loss": _contrastive, "metrics": ["accuracy"]}
    return Made(model, given, fit(list(PAIRS), (labels() > 0).astype("float32")[:, None]))


class SupervisedContrastive(keras.losses.Loss):
    def __call__(self, targets: Any, vectors: Any, sample_weight: Any = None) -> Any:
        vectors = ops.normalize(vectors, axis=1, order=2)
        logits = ops.matmul(vectors, ops.transpose(vectors)) / 0.5
        targets = ops.reshape(targets, (-1, 1))
        same = ops.cast(ops.equal(targets, ops.transpose(targets)), logits.dtype)
        same = same / ops.sum(same, 1, keepdims=True)
        return ops.mean(ops.categorical_crossentropy(same, logits, from_logits=True))


@program("keras-io: Supervised Contrastive Learning")
def loss_class_over_all_pairs() -> Made:
    """A Loss that overrides __call__ and compares all rows of the batch."""
    return Made(
        _embedding(),
        {"optimizer": adam(), "loss": SupervisedContrastive()},
        fit(features(WIDTH), labels()),
    )


class Entropy(keras.losses.Loss):
    def __call__(self, targets: Any, probabilities: Any, sample_weight: Any = None) -> Any:
        mean = ops.clip(ops.mean(probabilities, axis=0), 1e-8, 1.0)
        return ops.log(3.0) + ops.sum(mean * ops.log(mean))


class Consistency(keras.losses.Loss):
    def __call__(self, targets: Any, likeness: Any, sample_weight: Any = None) -> Any:
        wanted = ops.ones_like(likeness)
        return ops.mean(keras.losses.binary_crossentropy(wanted, likeness, from_logits=True))


@program("keras-io: Semantic Image Clustering")
def losses_of_outputs_without_targets() -> Made:
    """Two outputs with losses that ignore their targets, one of them of means over the rows."""
    anchor, near = keras.Input((WIDTH,)), keras.Input((WIDTH,))
    network = keras.Sequential([_embedding(), layers.Softmax()])
    a, b = network(anchor), network(near)
    likeness = ops.sum(a * b, -1, keepdims=True)
    model = keras.Model([anchor, near], [likeness, a])
    return Made(
        model,
        {"optimizer": adam(), "loss": [Consistency(), Entropy()]},
        fit(list(PAIRS), [np.zeros(30, "float32"), np.zeros(30, "float32")]),
    )


class AnchorPairs(keras.utils.PyDataset):
    """Batches `[2, classes, width]`: the first axis is anchors and positives."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return np.stack([part[index * 6 : index * 6 + 6] for part in PAIRS])


class MetricLearning(keras.Model):
    def train_step(self, data: Any) -> Any:
        data = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            anchors, positives = self(data[0], training=True), self(data[1], training=True)
            likeness = ops.einsum("ae,pe->ap", anchors, positives) / 0.2
            targets = ops.arange(6)
            loss = self.compute_loss(y=targets, y_pred=likeness)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@program(
    "keras-io: Metric learning for image similarity search", expects=r"(?i)slice|differ|batch\b"
)
def batches_whose_first_axis_is_no_rows() -> Made:
    """Batches whose first axis is anchors and positives, from a PyDataset without targets."""
    inputs = keras.Input((WIDTH,))
    model = MetricLearning(inputs, layers.UnitNormalization()(layers.Dense(3)(inputs)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Made(model, {"optimizer": adam(), "loss": loss}, fit(AnchorPairs()))


class AdaMatch(Own):
    """Pseudo-labels above a threshold that is a mean over the rows of the source."""

    def of(self, data: Any) -> Any:
        (source, y), target = data
        source_logits, target_logits = self.network(source), self.network(target)
        confidence = tf.reduce_mean(tf.reduce_max(tf.nn.softmax(source_logits), -1))
        pseudo = tf.stop_gradient(tf.nn.softmax(target_logits))
        mask = tf.cast(tf.reduce_max(pseudo, -1) > 0.9 * confidence, tf.float32)
        entropy = tf.nn.softmax_cross_entropy_with_logits(pseudo, target_logits)
        own = tf.nn.sparse_softmax_cross_entropy_with_logits(y, source_logits)
        return tf.reduce_mean(own) + tf.reduce_mean(entropy * mask)


@program("keras-io: Semi-supervision and domain adaptation with AdaMatch")
def threshold_of_the_batch() -> Made:
    """Two joined Datasets, and a mask by a threshold that is a mean over the rows."""
    joined = tf.data.Dataset.zip((batches(features(WIDTH), labels()), batches(PAIRS[1])))
    return Made(AdaMatch(_embedding()), {"optimizer": sgd()}, fit(joined))


class FirstHalf(Own):
    """Labelled and unlabelled rows of unequal numbers, joined in the step."""

    def of(self, data: Any) -> Any:
        (unlabelled, _), (labelled, y) = data
        rows = tf.concat((unlabelled, labelled), axis=0)
        features_ = self.network(rows, training=True)
        probe = self.network(labelled, training=False)
        entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(y, probe)
        return tf.reduce_mean(features_**2) + tf.reduce_mean(entropy)


@program(
    "keras-io: Semi-supervised image classification using contrastive pretraining with SimCLR",
    expects=r"(?i)rows|differ",
)
def two_datasets_of_unequal_batches() -> Made:
    """A batch of 12 unlabelled and 4 labelled rows, zipped, and joined in the step."""
    joined = tf.data.Dataset.zip(
        (batches(features(WIDTH), labels(), batch=12), batches(PAIRS[1], labels(), batch=4))
    )
    return Made(FirstHalf(_embedding()), {"optimizer": sgd()}, fit(joined))

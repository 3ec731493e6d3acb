"""Supervised programs with a train_step of their own: teachers, mixtures, adversaries, agents."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.programs.common import (
    BATCH,
    SPARSE,
    adam,
    batches,
    classifier,
    features,
    fit,
    images,
    labels,
    sgd,
)
from tests.programs.registry import Made, program


class Distiller(keras.Model):
    def __init__(self, student: keras.Model, teacher: keras.Model) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher

    def compile(self, optimizer: Any, metrics: Any, student_loss: Any, distillation: Any) -> None:
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss, self.distillation = student_loss, distillation

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, *more: Any, **named: Any
    ) -> Any:
        teacher = ops.softmax(self.teacher(x, training=False) / 3.0, axis=1)
        apart = self.distillation(teacher, ops.softmax(y_pred / 3.0, axis=1)) * 9.0
        return 0.1 * self.student_loss(y, y_pred) + 0.9 * apart

    def call(self, x: Any) -> Any:
        return self.student(x)


@program("keras-io: Knowledge Distillation", "keras-io: Distilling Vision Transformers")
def teacher_in_compute_loss() -> Made:
    """A compute_loss with two loss objects, a frozen teacher, and metrics of compile."""
    model = Distiller(classifier(final=None), classifier(layers.Dropout(0.5), final=None))
    model.teacher.trainable = False
    return Made(
        model,
        {
            "optimizer": adam(),
            "metrics": [keras.metrics.SparseCategoricalAccuracy()],
            "student_loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "distillation": keras.losses.KLDivergence(),
        },
        fit(features(4), labels()),
    )


class Step(keras.Model):
    """A model whose subclass says what a step's loss and logs are."""

    def of(self, x: Any, y: Any) -> Any:
        raise NotImplementedError

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.of(x, y)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss_of_step": tf.reduce_mean(loss)}


def _step(cls: type[Step], optimizer: Any = None, *middle: Any) -> Made:
    inputs = keras.Input((4,))
    hidden = layers.Dense(5, "tanh")(inputs)
    for layer in middle:
        hidden = layer(hidden)
    model = cls(inputs, layers.Dense(3)(hidden))
    given = {"optimizer": optimizer or sgd()}
    return Made(model, given, fit(features(4), labels()))


def _entropy(y: Any, logits: Any) -> Any:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(y, tf.int32), logits)


class Vector(Step):
    def of(self, x: Any, y: Any) -> Any:
        return _entropy(y, self(x, training=True))


@program("keras-io: Image similarity estimation using a Siamese Network with a triplet loss")
def gradient_of_a_vector() -> Made:
    """The gradient of a loss that has a value for each row."""
    return _step(Vector)


@program("Keras: compile(run_eagerly=True), with the gradient of a vector")
def gradient_of_a_vector_in_eager_mode() -> Made:
    """The gradient of a loss that has a value for each row, in eager steps."""
    made = _step(Vector)
    made.compile["run_eagerly"] = True
    return made


class Total(Step):
    def of(self, x: Any, y: Any) -> Any:
        return tf.reduce_sum(_entropy(y, self(x, training=True)))


@program("TensorFlow guide: Basic training loops")
def gradient_of_a_sum() -> Made:
    """The gradient of a loss that is summed over the rows of the batch."""
    return _step(Total, sgd(0.01))


class SumOverRows(Step):
    def of(self, x: Any, y: Any) -> Any:
        rows = tf.cast(tf.shape(x)[0], tf.float32)
        return tf.reduce_sum(_entropy(y, self(x, training=True))) / rows


@program("TensorFlow tutorial: Custom training with tf.distribute.Strategy")
def sum_over_the_rows_of_the_batch() -> Made:
    """A loss that is summed and divided by the rows of the batch."""
    return _step(SumOverRows)


class SumOverConstant(Step):
    def of(self, x: Any, y: Any) -> Any:
        return tf.reduce_sum(_entropy(y, self(x, training=True))) * (1.0 / 16)


@program("TensorFlow tutorial: Custom training with tf.distribute.Strategy")
def sum_over_a_constant_batch_size() -> Made:
    """A loss that is summed and divided by a batch size written as a constant."""
    return _step(SumOverConstant)


class Average(Step):
    def of(self, x: Any, y: Any) -> Any:
        return tf.nn.compute_average_loss(
            _entropy(y, self(x, training=True)), global_batch_size=tf.shape(x)[0]
        )


@program("TensorFlow tutorial: Custom training with tf.distribute.Strategy")
def average_loss_of_the_rows_that_the_step_sees() -> Made:
    """tf.nn.compute_average_loss by the rows that the step sees, as one device understands it."""
    return _step(Average)


class WeightedMean(Step):
    def of(self, x: Any, y: Any) -> Any:
        weight = tf.gather(tf.constant([1.0, 4.0, 0.2]), tf.cast(y, tf.int32))
        loss = _entropy(y, self(x, training=True)) * weight
        return tf.reduce_sum(loss) / tf.reduce_sum(weight)


@program("keras-io: Convolutional neural networks with weighted masks")
def mean_by_weights_of_the_batch() -> Made:
    """A loss that is divided by the sum of weights of the batch's rows."""
    return _step(WeightedMean)


class WeightsOfTheBatch(Step):
    def of(self, x: Any, y: Any) -> Any:
        outputs = self(x, training=True)
        likely = tf.reduce_max(tf.nn.softmax(outputs), 1)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        mean = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean")
        return loss(y, outputs, likely / tf.reduce_max(likely)) + mean(
            y, outputs, tf.stop_gradient(likely / tf.reduce_sum(likely))
        )


@program(
    "keras-io: Imbalanced classification: credit card fraud detection",
    "focal weights normalized over the batch",
)
def weights_normalized_over_the_batch() -> Made:
    """Keras' losses with weights that the step divides by their largest or their sum."""
    return _step(WeightsOfTheBatch)


class OverTheLargest(keras.losses.MeanSquaredError):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return super().call(y_true, y_pred) / ops.max(y_pred)


@program("Keras: a subclass of a loss with its own call")
def subclass_of_a_loss() -> Made:
    """A subclass of one of Keras' losses whose values depend on all rows."""
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1, "sigmoid")(inputs))
    x, y = features(4), features(1)
    return Made(
        model,
        {"optimizer": sgd(), "loss": OverTheLargest()},
        fit(x, y),
        evaluate={"x": x, "y": y, "batch_size": BATCH},
    )


class OtherOutputs(keras.Model):
    def predict_step(self, data: Any) -> Any:
        x = data[0] if isinstance(data, tuple) else data
        p = self(x)
        return {
            "chosen": tf.boolean_mask(p, p[:, 0] > 0.5),
            "constant": tf.range(3.0),
            "kernel": self.weights[0],
            "mean": tf.reduce_mean(p, 0),
            "first": p[:1],
            "second": p[::2],
            "both": tf.concat([p, 1.0 - p], 0),
            "best": tf.sort(p, 0)[-2:],
            "rows": p / tf.reduce_sum(p),
        }


@program("Keras: predict_step that selects")
def outputs_that_are_no_rows() -> Made:
    """Selections, constants, weights and joined rows as the results of a predict_step."""
    inputs = keras.Input((4,))
    model = OtherOutputs(inputs, layers.Dense(1, "sigmoid")(inputs))

    def use(model: keras.Model) -> dict[str, Any]:
        predicted = model.predict(features(4, rows=BATCH + 1), batch_size=BATCH, verbose=0)
        return {name: np.asarray(value) for name, value in predicted.items()}

    return Made(model, {"optimizer": sgd()}, use=use)


class KeptContrast(keras.losses.Loss):
    """How much the differences of neighbouring pixels change, for each pixel."""

    def __init__(self) -> None:
        super().__init__(reduction="none")
        self.kernel = tf.constant([[[[-1.0]], [[1.0]]]])

    def call(self, y_true: Any, y_pred: Any) -> Any:
        before, after = (tf.nn.conv2d(v, self.kernel, 1, "SAME") for v in (y_true, y_pred))
        return tf.square(before - after)


class Brighter(keras.Model):
    """Curves of images, learnt without targets."""

    def compile(self, **options: Any) -> None:
        super().compile(**options)
        self.contrast = KeptContrast()
        self.total = keras.metrics.Mean(name="total")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.total]

    def parts_of(self, x: Any, training: bool) -> dict[str, Any]:
        curves = self(x, training=training)
        brighter = x + curves * (tf.square(x) - x)
        sizes = tf.cast(tf.shape(curves), tf.float32)
        steps = tf.reduce_sum(tf.square(curves[:, 1:] - curves[:, : tf.shape(curves)[1] - 1]))
        exposure = tf.reduce_mean(tf.nn.avg_pool2d(brighter, 3, 3, "VALID"), 3)
        return {
            "smooth": steps / (sizes[2] * sizes[3]) / sizes[0],
            "contrast": tf.reduce_mean(self.contrast(brighter, x)),
            "exposure": tf.reduce_mean(tf.square(exposure - 0.6)),
        }

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            parts = self.parts_of(data, training=True)
            loss = sum(parts.values())
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.total.update_state(loss)
        return {"total": self.total.result(), **parts}

    def test_step(self, data: Any) -> Any:
        self.total.update_state(sum(self.parts_of(data, training=False).values()))
        return {"total": self.total.result()}


@program("keras-io: Zero-DCE for low-light image enhancement")
def losses_without_targets() -> Made:
    """Losses of images alone: sums divided by shapes, pools, a Loss with a value for each pixel."""
    inputs = keras.Input((6, 6, 1))
    hidden = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    curves = layers.Conv2D(1, 3, padding="same", activation="tanh")(hidden)
    data = batches(images())
    return Made(
        Brighter(inputs, curves),
        {"optimizer": adam()},
        fit(data, validation_data=batches(images(rows=9))),
    )


class Augmenting(keras.Model):
    """Adjusts the colors of its images by operations that TensorFlow cannot differentiate."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = layers.Dense(5, "tanh"), layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.last(self.hidden(tf.reduce_mean(x, axis=(1, 2))))

    def train_step(self, data: Any) -> Any:
        x, y = data
        x = tf.image.adjust_saturation(tf.image.adjust_contrast(x, 1.5), 0.7)
        counts = tf.math.bincount(y, weights=tf.reduce_mean(x, axis=(1, 2, 3)), minlength=3)
        with tf.GradientTape() as tape:
            rows = keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
            loss = tf.reduce_mean(rows * tf.gather(1 + counts / tf.reduce_sum(counts), y))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@program("Augmentation in the step; class weights of the batch")
def colors_adjusted_in_the_step() -> Made:
    """Contrast, saturation and counts of classes, which have no gradient in TensorFlow."""
    model = Augmenting()
    model.build((None, 6, 6, 3))
    return Made(model, {"optimizer": adam()}, fit(images(channels=3), labels()))


class Root(Step):
    def of(self, x: Any, y: Any) -> Any:
        return tf.sqrt(tf.reduce_mean(_entropy(y, self(x, training=True))))


@program("keras-io: Timeseries forecasting")
def root_of_a_mean() -> Made:
    """A loss that is the root of a mean over the rows."""
    return _step(Root)


class Recommender(Step):
    def of(self, x: Any, y: Any) -> Any:
        logits = self(x, training=True)
        scores = tf.tensordot(logits, logits, [[1], [1]])
        wanted = tf.cast(tf.equal(y[:, None], y[None]), tf.float32)
        return tf.reduce_mean(tf.square(scores - wanted))


class DotOfBatch(keras.Model):
    """The dot product of users and items contracts the rows, as the public example does."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = layers.Embedding(9, 2), layers.Embedding(9, 2)

    def call(self, inputs: Any) -> Any:
        users, items = self.users(inputs[:, 0]), self.items(inputs[:, 1])
        return ops.sigmoid(ops.tensordot(users, items, 2) + ops.sum(users, 1, keepdims=True))


@program("keras-io: Collaborative Filtering for Movie Recommendations")
def product_over_the_batch() -> Made:
    """A forward pass whose tensordot sums over the rows of the batch."""
    x = np.random.default_rng(4).integers(0, 9, (30, 2)).astype("int32")
    return Made(
        DotOfBatch(),
        {"optimizer": adam(), "loss": keras.losses.BinaryCrossentropy()},
        fit(x, (labels() > 0).astype("float32")[:, None]),
    )


@program("TensorFlow Recommenders: retrieval")
def scores_of_all_pairs() -> Made:
    """A step whose loss is of the scores of all pairs of rows."""
    return _step(Recommender)


class Cox(Step):
    """Each row is compared with all rows that end at least as late, in the order of their times."""

    def of(self, x: Any, y: Any) -> Any:
        risk = tf.gather(self(x, training=True)[:, 0], tf.argsort(x[:, 0], direction="DESCENDING"))
        return -tf.reduce_mean(risk - tf.math.cumulative_logsumexp(risk))


@program("survival analysis: Cox proportional hazards")
def rows_in_the_order_of_their_times() -> Made:
    """A loss that looks up rows by indices (tf.gather) and adds up all rows before each row."""
    return _step(Cox)


@tf.function  # type: ignore[untyped-decorator]
def likeness(outputs: Any) -> Any:
    """A contrastive loss: one number for all rows."""
    outputs = tf.math.l2_normalize(outputs, -1)
    scores = outputs @ tf.transpose(outputs) / 0.5
    own = tf.range(tf.shape(outputs)[0])
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(own, scores))


@tf.function  # type: ignore[untyped-decorator]
def losses_of_rows(y: Any, outputs: Any) -> Any:
    """A value for each row. AutoGraph makes the condition on a tensor an operation."""
    found = _entropy(y, outputs)
    if tf.rank(found) > 1:
        found = tf.reduce_mean(found, -1)
    return found


class OwnFunctions(Step):
    def of(self, x: Any, y: Any) -> Any:
        outputs = self(x, training=True)
        return likeness(outputs) + tf.sqrt(tf.reduce_mean(losses_of_rows(y, outputs)))


@program("TensorFlow guide: Better performance with tf.function")
def functions_within_the_step() -> Made:
    """A step that calls the user's own tf.functions, one of which compares rows."""
    return _step(OwnFunctions)


@tf.function  # type: ignore[untyped-decorator]
def compared_rows(y: Any, outputs: Any) -> Any:
    """A loss function of `compile` that compares rows."""
    return likeness(outputs) + tf.reduce_mean(_entropy(y, outputs))


@program("TensorFlow guide: a custom loss decorated with tf.function")
def function_as_the_loss() -> Made:
    """A tf.function as the loss of compile."""
    inputs = keras.Input((4,))
    outputs = layers.Dense(3)(layers.Dense(5, "tanh")(inputs))
    given = {"optimizer": sgd(), "loss": compared_rows}
    return Made(keras.Model(inputs, outputs), given, fit(features(4), labels()))


class ClippedTwice(Step):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(_entropy(y, self(x, training=True)))
        weights = self.trainable_variables
        clipped = [tf.clip_by_norm(g, 0.3) for g in tape.gradient(loss, weights)]
        clipped, norm = tf.clip_by_global_norm(clipped, 0.2)
        self.optimizer.apply_gradients(zip(clipped, weights, strict=True))
        return {"loss_of_step": loss, "norm": norm, "again": tf.linalg.global_norm(clipped)}


@program("PyTorch-like loops: clip each gradient, then all of them")
def clipped_twice() -> Made:
    """Gradients clipped one by one, and then by their global norm."""
    return _step(ClippedTwice)


class LazyPenalty(Step):
    def of(self, x: Any, y: Any) -> Any:
        loss = tf.reduce_mean(_entropy(y, self(x, training=True)))

        def penalty() -> Any:
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs = self(x, training=True)[:, :1]
            return tf.reduce_mean(tf.reduce_sum(inner.gradient(outputs, x) ** 2, -1))

        return loss + tf.cond(self.optimizer.iterations % 2 == 0, penalty, lambda: 0.0)


@program("StyleGAN2: lazy regularization")
def penalty_in_a_condition() -> Made:
    """A penalty of the gradient by the rows, computed in a condition in every second step."""
    return _step(LazyPenalty)


class GradientsInACondition(Step):
    def train_step(self, data: Any) -> Any:
        x, y = data
        weights = self.trainable_variables

        def of(value: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = value(tf.reduce_mean(_entropy(y, self(x, training=True))))
            return [loss, *tape.gradient(loss, weights)]

        loss, *gradients = tf.cond(
            self.optimizer.iterations % 2 == 0, lambda: of(tf.identity), lambda: of(tf.sqrt)
        )
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss_of_step": loss}


@program(
    "alternating losses inside tf.cond",
    expects="takes a gradient inside a condition or a loop",
)
def gradients_in_a_condition() -> Made:
    """Gradients of two losses, each in a branch of a condition."""
    return _step(GradientsInACondition)


class LossInACondition(Step):
    """Adds a penalty of a variable after the first step, in a condition that reads it."""

    reduce = staticmethod(tf.reduce_mean)

    def of(self, x: Any, y: Any) -> Any:
        losses = _entropy(y, self(x, training=True))
        loss, weight = tf.reduce_mean(losses), self.trainable_variables[0]
        return tf.cond(
            self.optimizer.iterations < 1,
            lambda: tf.identity(loss),
            lambda: 0.5 * self.reduce(losses) + tf.reduce_sum(tf.square(weight)),
        )


@program("warm-up of a penalty in tf.cond")
def loss_in_a_condition() -> Made:
    """A loss that tf.cond computes from means and from a variable, from the second step on."""
    return _step(LossInACondition)


class SumInACondition(LossInACondition):
    """Takes a sum over the rows in a branch, which the first step does not take."""

    reduce = staticmethod(tf.reduce_sum)


@program("another loss after the warm-up in tf.cond", expects="a condition on tensors that reads")
def sum_in_a_condition() -> Made:
    """A loss that is a sum over the rows in a branch that the first step does not take."""
    return _step(SumInACondition)


class StagesOfALoss(keras.Model):
    """Computes another loss in each stage of the training, in a function of TensorFlow."""

    @tf.function
    def of_this_stage(self, y: Any, y_pred: Any) -> Any:
        loss = tf.reduce_mean(_entropy(y, y_pred))
        if self.optimizer.iterations > 4:
            loss = loss + tf.reduce_mean(tf.abs(y_pred))
        elif self.optimizer.iterations > 2:
            loss = 2.0 * loss
        return loss

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *rest: Any, **more: Any) -> Any:
        return self.of_this_stage(y, y_pred)


@program("TensorFlow guide: Better performance with tf.function")
def stages_of_a_loss() -> Made:
    """An `if` and an `elif` on the number of the step, of which AutoGraph makes conditions."""
    inputs = keras.Input((4,))
    model = StagesOfALoss(inputs, layers.Dense(3)(inputs))
    return Made(model, {"optimizer": sgd()}, fit(features(4), labels(), epochs=3))


class BalancedClasses(keras.losses.Loss):
    """Weighs each row by a running count of its class, which the loss keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = keras.Variable(np.ones(3, "float32"), trainable=False)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        classes = tf.cast(tf.reshape(y_true, (-1,)), tf.int32)
        in_batch = tf.reduce_sum(tf.one_hot(classes, 3), axis=0)
        self.counts.assign(0.9 * self.counts + in_batch)
        counts = tf.convert_to_tensor(self.counts)
        weights = tf.reduce_sum(counts) / (3.0 * counts)
        return tf.gather(weights, classes) * _entropy(y_true, y_pred)


@program("Keras guide: losses with a state of their own")
def loss_with_a_state() -> Made:
    """A loss that keeps a Keras variable, which it changes by the rows of a batch."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    return Made(model, {"optimizer": sgd(), "loss": BalancedClasses()}, fit(features(4), labels()))


class MixUp(Step):
    def of(self, x: Any, y: Any) -> Any:
        mixing = keras.random.beta((ops.shape(x)[0], 1), 0.4, 0.4, seed=5)
        target = tf.one_hot(tf.cast(y, tf.int32), 3)
        mixed = mixing * x + (1 - mixing) * x[::-1]
        wanted = mixing * target + (1 - mixing) * target[::-1]
        predicted = self(mixed, training=True)
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(wanted, predicted))


@program("keras-io: MixUp augmentation for image classification")
def rows_mixed_with_other_rows() -> Made:
    """A step that mixes each row with another row of the batch."""
    return _step(MixUp)


class Adversarial(Step):
    by_sign = True

    def of(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = tf.reduce_mean(_entropy(y, self(x, training=True)))
        slope = inner.gradient(loss, x)
        moved = x + 0.1 * (tf.sign(slope) if self.by_sign else 16.0 * slope)
        return 0.5 * loss + 0.5 * tf.reduce_mean(_entropy(y, self(tf.stop_gradient(moved))))


class AdversarialBySize(Adversarial):
    by_sign = False


@program("TensorFlow tutorial: Adversarial example using FGSM", "NSL: adversarial regularization")
def adversary_by_the_sign() -> Made:
    """Rows moved by the sign of the gradient of the mean loss by them."""
    return _step(Adversarial)


@program("Neural structured learning: adversarial regularization")
def adversary_by_the_size() -> Made:
    """Rows moved by the gradient itself of a mean over the batch: its size depends on the rows."""
    return _step(AdversarialBySize)


class Agent(keras.Model):
    """Advantages are normalized over the batch or given; the log of the chosen action."""

    normalizes = False

    def train_step(self, data: Any) -> Any:
        (state, action, value), _ = data
        with tf.GradientTape() as tape:
            chances, critic = self(state, training=True)
            chosen = tf.reduce_sum(chances * tf.one_hot(action, 3), 1)
            advantage = value - tf.stop_gradient(critic[:, 0])
            if self.normalizes:
                advantage = (advantage - tf.reduce_mean(advantage)) / (
                    tf.math.reduce_std(advantage) + 1e-6
                )
            actor = -tf.math.log(chosen + 1e-6) * advantage
            loss = tf.reduce_mean(actor) + self.huber(value[:, None], critic)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"actor": tf.reduce_mean(actor), "largest": tf.reduce_max(advantage)}


class NormalizingAgent(Agent):
    normalizes = True


def _agent(cls: type[Agent]) -> Made:
    inputs = keras.Input((4,))
    hidden = layers.Dense(4, "relu")(inputs)
    model = cls(inputs, [layers.Dense(3, "softmax")(hidden), layers.Dense(1)(hidden)])
    model.huber = keras.losses.Huber()
    data = batches((features(4), labels(), features()), labels())
    return Made(model, {"optimizer": adam()}, fit(data))


@program("keras-io: Actor Critic Method")
def actor_and_critic() -> Made:
    """Custom targets, log probabilities, a Huber loss; the largest value of the batch as a log."""
    return _agent(Agent)


@program("keras-io: Proximal Policy Optimization")
def advantages_normalized_over_the_batch() -> Made:
    """Advantages normalized over the rows of the batch in the step."""
    return _agent(NormalizingAgent)


@tf.custom_gradient
def _reverse(x: Any) -> Any:
    return tf.identity(x), lambda upstream: -0.5 * upstream


class Reversal(layers.Layer):
    def call(self, x: Any) -> Any:
        return _reverse(x)


@program("TensorFlow: domain-adversarial training")
def reversed_gradient() -> Made:
    """A layer with a gradient of its own, between an encoder and a second output."""
    inputs = keras.Input((4,))
    hidden = layers.Dense(4, "tanh")(inputs)
    outputs = [layers.Dense(3, "softmax")(hidden), layers.Dense(1, "sigmoid")(Reversal()(hidden))]
    target = [labels(), (labels() > 0).astype("float32")[:, None]]
    return Made(
        keras.Model(inputs, outputs),
        {"optimizer": adam(), "loss": [SPARSE, "binary_crossentropy"], "loss_weights": [1.0, 0.3]},
        fit(features(4), target),
    )


def _dice(y_true: Any, y_pred: Any) -> Any:
    joint = ops.sum(y_true * y_pred)
    return 1 - (2 * joint + 1.0) / (ops.sum(y_true) + ops.sum(y_pred) + 1.0)


def _mae_function(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.abs(y_true - y_pred))


def _r_squared(y_true: Any, y_pred: Any) -> Any:
    rest = ops.sum(ops.square(y_true - y_pred))
    return 1 - rest / ops.sum(ops.square(y_true - ops.mean(y_true)))


@program(
    "keras-io: BASNet for segmentation",
    "Kaggle: dice loss",
    "keras-io: Low-light image enhancement using MIRNet",
)
def dice_loss_and_functions_as_metrics() -> Made:
    """A loss function of sums over the batch on a sigmoid; metrics that are functions."""
    x, y = features(4), (features(2) > 0).astype("float32")
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2, "sigmoid")])
    given = {"optimizer": adam(), "loss": _dice, "metrics": [_mae_function, _r_squared]}
    return Made(model, given, fit(x, y), evaluate={"x": x, "y": y, "batch_size": 16})


def _mean_entropy(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(keras.losses.sparse_categorical_crossentropy(y_true, y_pred))


@program("keras-io: Named Entity Recognition using Transformers")
def loss_function_of_one_number_on_a_softmax() -> Made:
    """A loss function of one number on a softmax, whose logits Keras finds by itself."""
    x = 20 * features(4)
    return Made(classifier(), {"optimizer": adam(), "loss": _mean_entropy}, fit(x, labels()))


def _pinball(level: float) -> Any:
    def loss(y_true: Any, y_pred: Any) -> Any:
        error = y_true - y_pred
        return ops.mean(ops.maximum(level * error, (level - 1) * error), axis=-1)

    return loss


@program("keras-io: Quantile regression", "keras-io: Keypoint detection")
def several_losses_of_one_output() -> Made:
    """Several outputs with losses made by a function, a Huber loss, and reduction by a sum."""
    inputs = keras.Input((4,))
    hidden = layers.Dense(4, "tanh")(inputs)
    model = keras.Model(inputs, [layers.Dense(1)(hidden) for _ in range(3)])
    losses = [_pinball(0.1), keras.losses.Huber(reduction="sum"), _pinball(0.9)]
    return Made(
        model, {"optimizer": sgd(0.01), "loss": losses}, fit(features(4), [features(1)] * 3)
    )


@program("targets with an axis less than the outputs of a recurrent layer")
def targets_broadcast_to_all_pairs() -> Made:
    """Outputs [rows, 1, 2] and targets [rows, 2]: Keras' losses and metrics compare all pairs."""
    inputs = keras.Input((1, 3))
    model = keras.Model(inputs, layers.LSTM(2, return_sequences=True)(inputs))
    y = features(2)
    compiled = {"optimizer": sgd(), "loss": keras.losses.Huber(), "metrics": ["mae"]}
    given = fit(features(1, 3), y, validation_data=(features(1, 3), y))
    return Made(model, compiled, given)


# Keras computes these from all pairs of targets [rows] and outputs [rows, 1].
OF_ALL_PAIRS = (
    *("categorical_accuracy", "categorical_hinge", "hinge"),
    *("kl_divergence", "poisson", "squared_hinge"),
)


@program("metrics of targets without the last axis of the outputs")
def metrics_of_flat_targets() -> Made:
    """Outputs [rows, 1] and targets [rows], which Keras' losses adapt, but not all its metrics."""
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1, "sigmoid")(inputs))
    rows = {"x": features(4), "y": labels(classes=2).astype("float32")}
    compiled = {"optimizer": sgd(), "loss": "binary_crossentropy", "metrics": list(OF_ALL_PAIRS)}
    return Made(model, compiled, fit(**rows), evaluate={**rows, "batch_size": 8})


@program("a loss of classes with the shape of a column")
def generalized_cross_entropy_of_a_column() -> Made:
    """Targets [rows, 1], for which this loss of Keras compares all pairs of rows."""
    loss = keras.losses.CategoricalGeneralizedCrossEntropy()
    given = fit(features(4), labels()[:, np.newaxis])
    return Made(classifier(), {"optimizer": sgd(), "loss": loss}, given)


class FixedRows(Step):
    def of(self, x: Any, y: Any) -> Any:
        return tf.reduce_sum(tf.square(self(x) - y)) / x.shape[0]


@program("a step that takes the number of rows from the shape", expects=r"so x\.shape\[0\] is None")
def rows_of_the_static_shape() -> Made:
    """A step that divides by `x.shape[0]`, which is known as all batches have the same size."""
    inputs = keras.Input((4,))
    rows = 2 * BATCH
    given = fit(features(4, rows=rows), features(1, rows=rows))
    return Made(FixedRows(inputs, layers.Dense(1)(inputs)), {"optimizer": sgd()}, given)


class SqueezedStep(Step):
    def of(self, x: Any, y: Any) -> Any:
        return tf.norm(tf.squeeze(self(x)) - tf.squeeze(y))


@program("a loss of outputs from which tf.squeeze removes all axes of size 1")
def squeezed_outputs() -> Made:
    """A step with tf.squeeze, and a last batch with one row for a replica."""
    inputs = keras.Input((4,))
    model = SqueezedStep(inputs, layers.Dense(1)(inputs))
    rows = BATCH + 2
    given = fit(features(4, rows=rows), features(1, rows=rows))
    return Made(model, {"optimizer": sgd()}, given)


class PreparesItsData(keras.Model):
    """Scales arrays before `fit`, `evaluate` and `predict`, as the tasks of KerasHub do."""

    def scaled(self, x: Any, y: Any = None, batch_size: int | None = None) -> tf.data.Dataset:
        parts = x if y is None else (x, y)
        data = tf.data.Dataset.from_tensor_slices(parts).batch(batch_size or 32)
        return data.map(lambda x, *more: (x / 2.0, *more) if more else x / 2.0)

    def fit(self, x: Any = None, y: Any = None, batch_size: int | None = None, **more: Any) -> Any:
        held = more.pop("validation_data")
        prepared = self.scaled(*held, batch_size)
        return super().fit(self.scaled(x, y, batch_size), validation_data=prepared, **more)

    def evaluate(
        self, x: Any = None, y: Any = None, batch_size: int | None = None, **more: Any
    ) -> Any:
        # Keras' `fit` gives this argument, and the data as it got it.
        if more.get("_use_cached_eval_dataset"):
            assert isinstance(x, tf.data.Dataset)
            return super().evaluate(x=x, y=y, batch_size=batch_size, **more)
        return super().evaluate(x=self.scaled(x, y, batch_size), **more)

    def predict(self, x: Any, batch_size: int | None = None, **more: Any) -> Any:
        return super().predict(self.scaled(x, None, batch_size), **more)


@program("KerasHub: Task.fit with a preprocessor", "keras-io: Semantic Similarity with KerasHub")
def data_prepared_by_the_model() -> Made:
    """A model that overrides `fit`, `evaluate` and `predict` to prepare its data."""
    inputs = keras.Input((4,))
    model = PreparesItsData(inputs, layers.Dense(3, "softmax")(layers.Dense(5, "tanh")(inputs)))
    held = (features(4)[:11], labels()[:11])
    return Made(
        model,
        {"optimizer": adam(), "loss": SPARSE, "metrics": ["accuracy"]},
        fit(features(4), labels(), validation_data=held),
        evaluate={"x": held[0], "y": held[1], "batch_size": BATCH},
        predict={"x": held[0], "batch_size": BATCH},
    )


class NamedByValue:
    """A key of a dict whose text has the value of its variable."""

    def __init__(self) -> None:
        self.scale = keras.Variable(1.5)

    def __repr__(self) -> str:
        return f"scaled by {float(ops.convert_to_numpy(self.scale))}"


class ScaledByKeys(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.names = {NamedByValue(): keras.Variable(0.5)}

    def call(self, x: Any) -> Any:
        for key, factor in self.names.items():
            x = x * key.scale + factor
        return x


@program("HGQ2: quantizers as keys of a dict")
def variables_in_keys_of_a_dict() -> Made:
    """A dict whose keys hold variables, and cannot be printed while a step is traced."""
    return Made(
        classifier(ScaledByKeys()), {"optimizer": sgd(), "loss": SPARSE}, fit(features(4), labels())
    )


class InHeads(layers.Layer):
    """Splits features into heads by a shape with the number of rows, and mixes each row's heads."""

    def call(self, x: Any) -> Any:
        rows = ops.shape(x)[0]
        heads = ops.reshape(x, (rows, -1, 2, 2))
        heads = ops.roll(heads, 1, axis=1) + ops.fft2((heads, ops.zeros_like(heads)))[0]
        return ops.reshape(heads, (rows, 12))


@program("KerasHub: attention of images, and FNet")
def features_reshaped_by_the_number_of_rows() -> Made:
    """A reshape by the number of rows and -1, a Fourier transform, and dropout behind them."""
    inputs = keras.Input((4,))
    x = layers.Dropout(0.3)(InHeads()(layers.Dense(12, "tanh")(inputs)))
    model = keras.Model(inputs, layers.Dense(3, "softmax")(x))
    data = (features(4), labels())
    return Made(
        model,
        {"optimizer": sgd(0.01), "loss": SPARSE},
        fit(*data),
        evaluate={"x": data[0], "y": data[1], "batch_size": BATCH},
    )


class InFours(layers.Layer):
    """Takes the batch for 4 groups of 4 rows, and subtracts the mean of each group."""

    def call(self, x: Any) -> Any:
        groups = ops.reshape(x, (4, 4, x.shape[-1]))
        centered = groups - ops.mean(groups, 1, keepdims=True)
        return ops.reshape(centered, (16, x.shape[-1]))


@program("A reshape to a fixed number of rows")
def fixed_number_of_rows() -> Made:
    """A layer that is written for one number of rows."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), InFours()])
    data = fit(features(4, rows=32), features(3, rows=32))
    return Made(model, {"optimizer": sgd(), "loss": "mse"}, data)


class InStages(keras.Model):
    """A model without `call`, whose step builds the layers, and updates all metrics by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.stages = layers.Dense(4, "tanh"), [layers.Dense(4, "tanh")]
        self.last = layers.Dense(3)

    def _loss(self, data: Any, training: bool) -> Any:
        x, y = data
        hidden = self.first(x, training=training)
        for stage in self.stages:
            hidden = stage(hidden, training=training)
        logits = self.last(hidden)
        return self.compute_loss(data, y, logits), y, logits

    def _logs(self, loss: Any, y: Any, logits: Any) -> Any:
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, logits)
        return {metric.name: metric.result() for metric in self.metrics}

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss, y, logits = self._loss(data, training=True)
        weights = [self.first.trainable_variables, self.last.trainable_variables]
        weights += [stage.trainable_variables for stage in self.stages]
        gradients = tape.gradient(loss, weights)
        pairs = zip(tf.nest.flatten(gradients), tf.nest.flatten(weights), strict=True)
        self.optimizer.apply_gradients(list(pairs))
        return self._logs(loss, y, logits)

    def test_step(self, data: Any) -> Any:
        return self._logs(*self._loss(data, training=False))


@program("keras-io: A Vision Transformer without Attention")
def stages_of_a_model_without_call() -> Made:
    """Layers and compiled metrics that a step builds, and gradients in lists of lists."""
    x, y = features(4), labels()
    metrics = [
        keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
        keras.metrics.SparseTopKCategoricalAccuracy(2, name="top-2-accuracy"),
    ]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Made(
        InStages(),
        {"optimizer": adam(), "loss": loss, "metrics": metrics},
        fit(x, y, validation_data=(x[:7], y[:7])),
        evaluate={"x": x, "y": y, "batch_size": BATCH},
    )

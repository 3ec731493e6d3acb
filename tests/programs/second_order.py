"""Steps with a gradient step inside them, as in meta-learning and sharpness-aware training."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tests.programs.common import adam, features, fit, labels, sgd
from tests.programs.registry import Made, program

DATA = (features(4), labels())
INNER_RATE = 0.1


class Adapted(keras.Model):
    """Trains weights from which one gradient step leads to a small loss."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(5, "tanh")
        self.last = layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.last(self.hidden(x))

    def loss_of(self, y: Any, outputs: Any) -> Any:
        losses = keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
        return tf.reduce_mean(losses)

    def outputs_by(self, weights: Any, x: Any) -> Any:
        """Returns the outputs for weights that are tensors."""
        kernel, bias, last_kernel, last_bias = weights
        return tf.tanh(x @ kernel + bias) @ last_kernel + last_bias

    def train_step(self, data: Any) -> Any:
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                before = self.loss_of(y, self(x))
            gradients = inner.gradient(before, weights)
            moved = [w - INNER_RATE * g for w, g in zip(weights, gradients, strict=True)]
            loss = self.loss_of(y, self.outputs_by(moved, x))
        self.optimizer.apply(outer.gradient(loss, weights), weights)
        return {"loss": loss, "before": before}


def _made(model: keras.Model) -> Made:
    model(DATA[0][:1])
    return Made(model, {"optimizer": adam()}, fit(*DATA))


@program("MAML: a functional forward pass with the moved weights")
def gradient_through_a_gradient_step() -> Made:
    """An inner gradient step by the rows of the batch, and a gradient through it."""
    return _made(Adapted())


class AdaptedByKeras(Adapted):
    def outputs_by(self, weights: Any, x: Any) -> Any:
        return self.stateless_call(weights, [], x)[0]


@program("MAML: Keras' stateless_call with the moved weights")
def gradient_through_a_stateless_call() -> Made:
    """An inner gradient step, whose weights Keras' `stateless_call` takes."""
    return _made(AdaptedByKeras())


class Sharpness(Adapted):
    """Goes uphill first, takes the gradient there, and comes back."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            before = self.loss_of(y, self(x))
        moves = [0.5 * g for g in tape.gradient(before, weights)]
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_add(move)
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x))
        gradients = tape.gradient(loss, weights)
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_sub(move)
        self.optimizer.apply(gradients, weights)
        return {"loss": loss, "before": before}


@program("Sharpness-aware minimization")
def gradient_at_moved_weights() -> Made:
    """A gradient at weights that the step has moved by another gradient and moves back."""
    return _made(Sharpness())


class SplitRows(Adapted):
    """Adapts by the first half of the batch, and measures by the second half."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        weights = self.trainable_variables
        half = tf.shape(x)[0] // 2
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                before = self.loss_of(y[:half], self(x[:half]))
            gradients = inner.gradient(before, weights)
            moved = [w - INNER_RATE * g for w, g in zip(weights, gradients, strict=True)]
            loss = self.loss_of(y[half:], self.outputs_by(moved, x[half:]))
        self.optimizer.apply(outer.gradient(loss, weights), weights)
        return {"loss": loss, "before": before}


@program("MAML: support and query rows of one batch")
def gradient_step_by_half_of_the_rows() -> Made:
    """An inner gradient step by the first half of the rows, and a loss of the second half."""
    return _made(SplitRows())


class PerTask(Adapted):
    """Each row is a task of its own, with an inner step on its own examples."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        weights = self.trainable_variables

        def of_task(row: Any) -> Any:
            x, y = row
            x, y = x[None], y[None]
            with tf.GradientTape() as inner:
                values = [tf.identity(w) for w in weights]
                inner.watch(values)
                before = self.loss_of(y, self.outputs_by(values, x))
            gradients = inner.gradient(before, values)
            moved = [w - INNER_RATE * g for w, g in zip(weights, gradients, strict=True)]
            return self.loss_of(y, self.outputs_by(moved, x))

        with tf.GradientTape() as outer:
            loss = tf.reduce_mean(tf.map_fn(of_task, (x, y), fn_output_signature=tf.float32))
        self.optimizer.apply(outer.gradient(loss, weights), weights)
        return {"loss": loss}


@program("MAML: one task a row, in tf.map_fn")
def gradient_step_of_each_row() -> Made:
    """An inner gradient step for each row, in a loop over the rows."""
    return _made(PerTask())


class SeveralSteps(Adapted):
    """Takes two inner steps, by losses that are roots of means."""

    def inner_loss(self, loss: Any) -> Any:
        return tf.sqrt(loss)

    def inner_gradient(self, gradient: Any) -> Any:
        return gradient

    def train_step(self, data: Any) -> Any:
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as outer:
            moved = [tf.identity(w) for w in weights]
            for _ in range(2):
                with tf.GradientTape() as inner:
                    inner.watch(moved)
                    before = self.inner_loss(self.loss_of(y, self.outputs_by(moved, x)))
                gradients = map(self.inner_gradient, inner.gradient(before, moved))
                moved = [w - INNER_RATE * g for w, g in zip(moved, gradients, strict=True)]
            loss = self.loss_of(y, self.outputs_by(moved, x))
        self.optimizer.apply(outer.gradient(loss, weights), weights)
        return {"loss": loss, "before": before}


@program("MAML: two inner steps")
def gradient_through_two_steps() -> Made:
    """Two inner gradient steps by roots of means, and a gradient through both."""
    return _made(SeveralSteps())


class ClippedSteps(SeveralSteps):
    """Takes two inner steps, and clips their gradients by the norm."""

    def inner_loss(self, loss: Any) -> Any:
        return loss

    def inner_gradient(self, gradient: Any) -> Any:
        return tf.clip_by_norm(gradient, 0.1)


@program("MAML: inner gradients that are clipped by their norm")
def gradient_through_clipped_steps() -> Made:
    """Two inner steps by clipped gradients, by whose weights the second one differentiates."""
    return _made(ClippedSteps())


class Attacked(Adapted):
    """Trains on inputs that two steps have moved in a direction of all rows together."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        moved = tf.zeros_like(x)
        for _ in range(2):
            with tf.GradientTape() as tape:
                tape.watch(moved)
                losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
                before = losses(y, self(x + moved))
            gradient = tape.gradient(before, moved)
            # After the first step each row depends on the other rows.
            moved += gradient / tf.norm(gradient)
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x + tf.stop_gradient(moved)))
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss, "before": before}

    def test_step(self, data: Any) -> Any:
        x, y = data
        moved = x - tf.reduce_mean(x, axis=0)
        with tf.GradientTape() as tape:
            tape.watch(moved)
            before = tf.sqrt(self.loss_of(y, self(moved)))
        gradient = tape.gradient(before, moved)
        return {"loss": self.loss_of(y, self(moved + 0.1 * tf.sign(gradient)))}


@program("adversarial training, normalized by the norm of the batch")
def attack_in_a_direction_of_all_rows() -> Made:
    """Gradients by inputs that depend on all rows, in training and in the evaluation."""
    model = Attacked()
    model(DATA[0][:1])
    evaluated = {"x": DATA[0], "y": DATA[1], "batch_size": 7}
    return Made(model, {"optimizer": adam()}, fit(*DATA), evaluate=evaluated)


class ByOutputs(Adapted):
    """Moves the outputs of a layer, which are centered over the batch, by their gradient."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        with tf.GradientTape() as tape:
            hidden = self.hidden(x)
            centered = hidden - tf.reduce_mean(hidden, axis=0)
            before = losses(y, self.last(centered))
        moved = centered + tape.gradient(before, centered)
        weights = self.last.trainable_variables
        with tf.GradientTape() as tape:
            loss = losses(y, self.last(tf.stop_gradient(moved)))
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@program("virtual adversarial training of features", expects=r"Call tape\.watch\(tensor\)")
def gradient_by_outputs_that_no_tape_watches() -> Made:
    """A gradient by outputs of a layer that depend on all rows."""
    return _made(ByOutputs())


class StepsInALoop(Adapted):
    """Takes inner steps in a loop, through which the replicas cannot exchange values."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        weights = self.trainable_variables

        def step(*moved: Any) -> Any:
            with tf.GradientTape() as inner:
                inner.watch(moved)
                before = self.loss_of(y, self.outputs_by(moved, x))
            gradients = inner.gradient(before, moved)
            return [w - INNER_RATE * g for w, g in zip(moved, gradients, strict=True)]

        with tf.GradientTape() as outer:
            first = [tf.identity(w) for w in weights]
            moved = tf.while_loop(lambda *_: True, step, first, maximum_iterations=2)
            loss = self.loss_of(y, self.outputs_by(moved, x))
        self.optimizer.apply(outer.gradient(loss, weights), weights)
        return {"loss": loss}


@program(
    "MAML: inner steps in tf.while_loop", expects="a loop on tensors.*Write the loop in Python"
)
def gradient_steps_in_a_loop() -> Made:
    """Inner gradient steps in a loop on tensors."""
    return _made(StepsInALoop())


class GradientPenalty(keras.Model):
    """Adds the size of the gradient of a loss by the inputs."""

    factor: float

    def loss_of(self, x: Any, y: Any) -> Any:
        raise NotImplementedError

    def train_step(self, data: Any) -> Any:
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = self.loss_of(x, y)
            penalty = self.factor * tf.reduce_sum(tf.square(tape.gradient(loss, x)))
            total = loss + penalty
        self.optimizer.apply(outer.gradient(total, weights), weights)
        return {"loss": loss, "penalty": penalty}


class PenaltyThroughNormalization(GradientPenalty):
    """Has a BatchNormalization between the inputs and the loss."""

    factor = 10.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.Sequential(
            [keras.Input((4,)), layers.Dense(5), layers.BatchNormalization(), layers.Dense(1)]
        )

    def call(self, x: Any) -> Any:
        return self.inner(x)

    def loss_of(self, x: Any, y: Any) -> Any:
        outputs = self.inner(x, training=True)
        return tf.reduce_mean(tf.square(outputs[:, 0] - tf.cast(y, tf.float32)))


@program("Gradient penalty with BatchNormalization")
def gradient_penalty_through_normalization() -> Made:
    """The gradient by the inputs of a normalized batch, and a gradient through it."""
    model = PenaltyThroughNormalization()
    return Made(model, {"optimizer": sgd(0.01)}, fit(*DATA))


class PenaltyOfCompiledLosses(GradientPenalty):
    factor = 0.02

    def loss_of(self, x: Any, y: Any) -> Any:
        return self.compute_loss(x, y, self(x, training=True))


def _distances(y: Any, p: Any) -> Any:
    rows = tf.tanh(p)
    return tf.reduce_mean(tf.square(rows[:, None] - tf.gather(rows, [1, 0])[None]) ** 2)


@program("Gradient penalty of the losses of compile")
def gradient_penalty_of_losses_of_all_rows() -> Made:
    """A gradient through the gradient of compiled losses that compare rows."""
    inputs = keras.Input((4,))
    middle = layers.Dense(5, "tanh")(inputs)
    outputs = {name: layers.Dense(3)(middle) for name in ("circle", "distances", "entropy")}
    # The second gradient of Circle is NaN for other rows than those of length 1.
    outputs["circle"] = layers.UnitNormalization()(outputs["circle"])
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loss = {"circle": keras.losses.Circle(), "distances": _distances, "entropy": entropy}
    x, y = DATA
    return Made(
        PenaltyOfCompiledLosses(inputs, outputs),
        {"optimizer": sgd(0.001), "loss": loss},
        fit(x, dict.fromkeys(loss, y)),
    )


class GradientField(keras.Model):
    """Trains a potential whose gradient by the inputs is the data, as in score matching."""

    def train_step(self, data: Any) -> Any:
        weights = self.trainable_variables
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(data)
                potential = tf.sin(self(data, training=True))
            distances = tape.gradient(potential, data) - data
            loss = tf.reduce_mean(tf.square(distances))
        self.optimizer.apply(outer.gradient(loss, weights), weights)
        return {"loss": loss}


@program("bayesflow: DiffusionModel by a potential", "Score matching with an energy")
def gradient_of_a_normalized_potential() -> Made:
    """Gradients of gradients through four normalizations, whose variance is by a constant mean."""
    inputs = keras.Input((4,))
    x = layers.LayerNormalization()(layers.Dense(8, "tanh")(inputs))
    x = layers.BatchNormalization()(layers.Dense(8, "tanh")(x))
    images = layers.BatchNormalization()(layers.Reshape((2, 2, 2))(x))
    x = layers.BatchNormalization(axis=1)(layers.Reshape((4, 2))(images))
    outputs = layers.Dense(1)(layers.Flatten()(x))
    return Made(GradientField(inputs, outputs), {"optimizer": sgd(0.01)}, fit(features(4)))


class PenaltyThroughALoop(Adapted):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs = self(x, training=True)
                # A number that all rows before a row change, as in a filter.
                total = tf.foldl(lambda kept, row: 0.9 * kept + tf.tanh(row[0]), outputs, 0.0)
            slope = inner.gradient(total, x)
            loss = self.loss_of(y, outputs) + 0.1 * total + tf.reduce_mean(tf.square(slope))
        weights = self.trainable_variables
        self.optimizer.apply(outer.gradient(loss, weights), weights)
        return {"loss": loss}


@program("Gradient penalty of a filter over the rows", expects="inside two gradient tapes")
def gradient_penalty_through_a_loop_over_rows() -> Made:
    """A gradient penalty of a value that a loop on tensors computes from all rows."""
    return _made(PenaltyThroughALoop())


_computed_again = tf.recompute_grad(lambda x: tf.tanh(x) * x)


class LossBehindALoop(layers.Layer):
    def call(self, x: Any) -> Any:
        rows = tf.map_fn(lambda row: row / (1 + tf.norm(row)), x)
        self.add_loss(tf.reduce_mean(_computed_again(rows)))
        return rows


class ComputesItsLoss(keras.Model):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"found": loss}


@program("TensorFlow guide: gradient checkpointing")
def added_loss_that_is_computed_again_behind_a_loop() -> Made:
    """A loop over rows, whose outputs a function takes that gradients compute once more."""
    inputs = keras.Input((4,))
    model = ComputesItsLoss(inputs, LossBehindALoop()(layers.Dense(3)(inputs)))
    return Made(model, {"optimizer": adam(), "loss": "mse"}, fit(features(4), features(3)))


class Contractive(Adapted):
    """Adds the size of each row's matrix of derivatives to the loss."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs = self(x, training=True)
            jacobian = inner.batch_jacobian(outputs, x)
            loss = self.loss_of(y, outputs) + 0.1 * tf.norm(jacobian)
        self.optimizer.apply(outer.gradient(loss, weights), weights)
        return {"loss": loss}


@program("Contractive autoencoder")
def jacobian_of_each_row() -> Made:
    """A penalty of the matrices of derivatives of all rows, by `batch_jacobian`."""
    return _made(Contractive())


class CachesGradients(Adapted):
    """Compares all rows in a loss, and passes its gradient by rows on to the weights."""

    def train_step(self, data: Any) -> Any:
        x, _ = data
        weights = self.trainable_variables
        with tf.GradientTape() as of_weights:
            outputs = self(x, training=True)
        with tf.GradientTape() as of_outputs:
            of_outputs.watch(outputs)
            closeness = tf.matmul(outputs, outputs, transpose_b=True)
            loss = tf.reduce_mean(-tf.linalg.diag_part(tf.nn.log_softmax(closeness)))
        cached = of_outputs.gradient(loss, outputs)
        gradients = of_weights.gradient(outputs, weights, output_gradients=cached)
        self.optimizer.apply(gradients, weights)
        return {"loss": loss}


@program("Gradient caching for contrastive learning")
def gradients_given_by_the_step() -> Made:
    """A tape that differentiates rows with `output_gradients` of the step's own."""
    return _made(CachesGradients())


class Rematerialized(layers.Layer):
    def build(self, shape: Any) -> None:
        self.inner = layers.Dense(5, "tanh")
        self.inner.build(shape)

    def call(self, x: Any) -> Any:
        return keras.remat(self.inner)(x)

    def compute_output_shape(self, shape: Any) -> Any:
        return (shape[0], 5)


@program("Keras: rematerialization")
def rematerialized_layer() -> Made:
    """A layer whose outputs `keras.remat` computes once more for the gradients."""
    inputs = keras.Input((4,))
    hidden = layers.BatchNormalization()(Rematerialized()(inputs))
    model = keras.Model(inputs, layers.Dense(3, "softmax")(hidden))
    loss = "sparse_categorical_crossentropy"
    return Made(model, {"optimizer": adam(), "loss": loss}, fit(*DATA))

"""Optimizers of one's own, several of them, and what steps do with gradients by hand."""

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
    classifier,
    features,
    fit,
    labels,
    sgd,
    tokens,
)
from tests.programs.registry import Made, program

DATA = (features(4), labels())


class Centralized(keras.optimizers.RMSprop):
    """Takes the mean out of each gradient of a matrix."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        grads = [
            g
            if len(g.shape) < 2
            else g - ops.mean(g, axis=list(range(len(g.shape) - 1)), keepdims=True)
            for g in grads
        ]
        return super().apply(grads, trainable_variables)


@program("keras-io: Gradient Centralization for Better Training Performance")
def centralized_gradients() -> Made:
    """A subclass of an optimizer whose apply changes the gradients linearly."""
    return Made(classifier(), {"optimizer": Centralized(0.01), "loss": SPARSE}, fit(*DATA))


class Normalized(keras.optimizers.SGD):
    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        grads = [g / (ops.norm(ops.reshape(g, (-1,))) + 1e-6) for g in grads]
        return super().apply(grads, trainable_variables)


@program("keras-io: Large-batch training")
def normalized_gradients() -> Made:
    """A subclass of an optimizer whose apply divides each gradient by its norm."""
    return Made(classifier(), {"optimizer": Normalized(0.05), "loss": SPARSE}, fit(*DATA))


class Signed(keras.optimizers.Optimizer):
    """Moves by the sign of an average of gradients, which it keeps for each variable."""

    def build(self, variables: Any) -> None:
        if self.built:
            return
        super().build(variables)
        self.averages = self.add_optimizer_variables(variables, "average")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        average = self.averages[self._get_variable_index(variable)]
        self.assign(average, 0.8 * average + 0.2 * gradient)
        self.assign_sub(variable, learning_rate * average / (ops.abs(average) + 0.01))


class SelectedRows(keras.optimizers.Optimizer):
    """Updates those rows of a table that a batch looks up, by a method of `tf.Variable`."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if isinstance(gradient, tf.IndexedSlices):
            values = learning_rate * gradient.values
            variable.scatter_sub(tf.IndexedSlices(values, gradient.indices))
        else:
            variable.assign_sub(learning_rate * gradient)


@program("Optimizers that update some rows of a table, as in tf_keras")
def optimizer_by_methods_of_tensorflow() -> Made:
    """An update_step that calls `assign_sub` and `scatter_sub` of the variable."""
    model = keras.Sequential(
        [layers.Embedding(9, 4), layers.GlobalAveragePooling1D(), layers.Dense(3, "softmax")]
    )
    model.build((None, 6))
    return Made(model, {"optimizer": SelectedRows(0.5), "loss": SPARSE}, fit(tokens(), labels()))


@program("Keras: Optimizer subclass")
def optimizer_class_of_its_own() -> Made:
    """An Optimizer with build and update_step of its own."""
    return Made(classifier(), {"optimizer": Signed(0.01), "loss": SPARSE}, fit(*DATA))


class Warm(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step: Any) -> Any:
        step = ops.cast(step, "float32")
        return 0.05 * ops.minimum(ops.rsqrt(step + 1), (step + 1) * 0.3)


@program(
    "keras-io: Automatic Speech Recognition with Transformer",
    "keras-io: A Vision Transformer without Attention",
    "keras-io: Image Classification using BigTransfer (BiT)",
)
def schedule_of_its_own() -> Made:
    """A LearningRateSchedule of its own, with warm-up."""
    return Made(classifier(), {"optimizer": sgd(Warm()), "loss": SPARSE}, fit(*DATA))


class ByHand(keras.Model):
    """Gradients pass through `change` before they are applied."""

    def change(self, gradients: Any) -> Any:
        raise NotImplementedError

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = self.change(tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def _by_hand(cls: type[keras.Model], *middle: Any) -> Made:
    inputs = keras.Input((4,))
    hidden = layers.Dense(5, "tanh")(inputs)
    for layer in middle:
        hidden = layer(hidden)
    model = cls(inputs, layers.Dense(3, "softmax")(hidden))
    return Made(model, {"optimizer": adam(), "loss": SPARSE}, fit(*DATA))


class GlobalClip(ByHand):
    def change(self, gradients: Any) -> Any:
        return tf.clip_by_global_norm(gradients, 0.1)[0]


@program("TensorFlow tutorial: Text generation with an RNN")
def clipped_by_the_global_norm() -> Made:
    """Gradients clipped by tf.clip_by_global_norm in the step."""
    return _by_hand(GlobalClip)


class OwnClip(ByHand):
    def change(self, gradients: Any) -> Any:
        return [tf.clip_by_norm(g, 0.05) for g in gradients]


@program("keras-io: WGAN with clipping")
def clipped_one_by_one() -> Made:
    """Gradients clipped by tf.clip_by_norm, each by itself, in the step."""
    return _by_hand(OwnClip)


class LookupClip(ByHand):
    def change(self, gradients: Any) -> Any:
        words, positions, *others = gradients
        assert isinstance(words, tf.IndexedSlices)
        assert isinstance(positions, tf.IndexedSlices)
        clipped = tf.clip_by_value(tf.clip_by_norm(words, 0.01), -0.001, 0.001)
        return [clipped, *(tf.clip_by_norm(g, 0.05) for g in (positions, *others))]


class WordsAndPositions(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = layers.Embedding(9, 3), layers.Embedding(6, 3)

    def call(self, x: Any) -> Any:
        return self.words(x) + self.positions(ops.arange(6))


@program("Keras: clipvalue and clipnorm of an optimizer")
def clipped_by_the_optimizer() -> Made:
    """Gradients of Embeddings that the optimizer clips; the last batch has one row."""
    inputs = keras.Input((6,))
    words = layers.GlobalAveragePooling1D()(WordsAndPositions()(inputs))
    model = keras.Model(inputs, layers.Dense(3, "softmax")(words))
    optimizer = keras.optimizers.Adam(0.01, clipvalue=0.001)
    data = fit(tokens(rows=BATCH + 1), labels(rows=BATCH + 1))
    return Made(model, {"optimizer": optimizer, "loss": SPARSE}, data)


@program("keras-io: Text classification with Transformer", "clipping of each gradient")
def clipped_gradients_of_lookups() -> Made:
    """Gradients of Embeddings of words and positions, clipped one by one in the step."""
    inputs = keras.Input((6,))
    words = layers.GlobalAveragePooling1D()(WordsAndPositions()(inputs))
    model = LookupClip(inputs, layers.Dense(3, "softmax")(words))
    return Made(model, {"optimizer": adam(), "loss": SPARSE}, fit(tokens(), labels()))


class Heads(layers.Layer):
    """A layer that holds an optimizer for its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(3)
        self.optimizer = keras.optimizers.Adam(0.01)

    def call(self, x: Any) -> Any:
        return self.dense(x)


class OptimizerOfALayer(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = layers.Dense(5, "tanh"), Heads()

    def call(self, x: Any) -> Any:
        return self.head(self.body(x))

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        of_body, of_head = self.body.trainable_variables, self.head.trainable_variables
        gradients = tape.gradient(loss, [*of_body, *of_head])
        self.optimizer.apply(gradients[: len(of_body)], of_body)
        self.head.optimizer.apply(gradients[len(of_body) :], of_head)
        return {"loss": loss}


@program("multi-task models: an optimizer for each head")
def optimizer_held_by_a_layer() -> Made:
    """Two optimizers, of which a layer of the model holds one."""
    model = OptimizerOfALayer()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made = Made(model, {"optimizer": sgd(), "loss": loss}, fit(*DATA))
    made.optimizers = {"of_head": model.head.optimizer}
    return made


class ValueClip(ByHand):
    def change(self, gradients: Any) -> Any:
        return [tf.clip_by_value(g, -0.01, 0.01) for g in gradients]


@program("keras-io: Deep Deterministic Policy Gradient")
def clipped_by_value() -> Made:
    """Gradients clipped by tf.clip_by_value in the step."""
    return _by_hand(ValueClip)


class Noisy(ByHand):
    def change(self, gradients: Any) -> Any:
        return [g + 0.01 * keras.random.normal(g.shape, seed=3) for g in gradients]


@program("TensorFlow Privacy: noisy gradients")
def noisy_gradients() -> Made:
    """Noise added to the gradients, of the weights' shapes."""
    return _by_hand(Noisy)


class Accumulating(keras.Model):
    """Adds gradients up in variables, and applies them every second step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.counter = tf.Variable(0, dtype=tf.int32, trainable=False)
        self.sums = [
            tf.Variable(tf.zeros(w.shape), trainable=False) for w in self.trainable_variables
        ]

    def train_step(self, data: Any) -> Any:
        self.counter.assign_add(1)
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        for total, gradient in zip(self.sums, gradients, strict=True):
            total.assign_add(gradient / 2.0)
        tf.cond(tf.equal(self.counter, 2), self._apply, lambda: None)
        return {"loss": loss}

    def _apply(self) -> None:
        self.optimizer.apply_gradients(zip(self.sums, self.trainable_variables, strict=True))
        self.counter.assign(0)
        for total in self.sums:
            total.assign(tf.zeros_like(total))


@program(
    "Stack Overflow: gradient accumulation in a custom train_step", expects="inside a condition"
)
def accumulated_by_hand() -> Made:
    """Gradients added up in variables of the model, applied inside a tf.cond."""
    return _by_hand(Accumulating)


class Sharpness(keras.Model):
    """Two passes: weights are moved along the gradient, and back before the update."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        norm = tf.sqrt(sum(tf.reduce_sum(g * g) for g in gradients))
        moves = [g * 0.5 / (norm + 1e-6) for g in gradients]
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_add(move)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, weights)
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_sub(move)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


@program("keras-io: Sharpness-Aware Minimization")
def sharpness_aware() -> Made:
    """A step that moves the weights by its own gradient and computes another one there."""
    return _by_hand(Sharpness)


class TwoOptimizers(keras.Model):
    def compile(self, first: Any, second: Any, **options: Any) -> None:
        super().compile(**options)
        self.first_optimizer, self.second_optimizer = first, second

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.first_optimizer.apply_gradients(zip(gradients[:2], weights[:2], strict=True))
        self.second_optimizer.apply_gradients(zip(gradients[2:], weights[2:], strict=True))
        norm = tf.linalg.global_norm(gradients)
        return {"loss": loss, "norm": norm, "rate": self.first_optimizer.learning_rate}


@program("keras-io: Wide & deep learning", "TensorFlow Addons: MultiOptimizer")
def two_optimizers_by_layer() -> Made:
    """An optimizer for each half of the layers; the norm of gradients and the rate as logs."""
    made = _by_hand(TwoOptimizers)
    made.compile = {"first": adam(), "second": sgd(0.05), "loss": SPARSE}
    return made


class OwnNorm(ByHand):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "norm": tf.sqrt(sum(tf.reduce_sum(g**2) for g in gradients))}


@program("keras-io: debugging gradients")
def norm_of_gradients_as_a_log() -> Made:
    """A log that is the norm of the step's own gradients, computed by hand."""
    return _by_hand(OwnNorm)


class ByIteration(keras.Model):
    def train_step(self, data: Any) -> Any:
        x, y = data
        weight = ops.minimum(ops.cast(self.optimizer.iterations, "float32") / 3.0, 1.0)
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted) + weight * ops.mean(predicted**2)
        gradients = tape.gradient(loss, self.trainable_variables)
        scaled = [g * (2.0 if len(g.shape) > 1 else 0.5) for g in gradients]
        self.optimizer.apply(scaled, self.trainable_variables)
        return {"loss": loss, "weight": weight}


@program("keras-io: Variational AutoEncoder with warm-up")
def loss_weight_by_iterations() -> Made:
    """A weight in the loss by the optimizer's iterations; gradients scaled for each variable."""
    return _by_hand(ByIteration)


@program("Keras: use_ema, SwapEMAWeights, gradient accumulation")
def averaged_weights_and_accumulation() -> Made:
    """Options of Keras' optimizers: averages of weights swapped for evaluation, accumulation."""
    optimizer = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5, clipvalue=0.05)
    given = {"optimizer": optimizer, "loss": SPARSE}
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    return Made(classifier(layers.Dropout(0.2)), given, fit(*DATA, callbacks=[swap], epochs=3))


class Constrained(keras.constraints.Constraint):
    def __call__(self, weight: Any) -> Any:
        return ops.clip(weight, -0.3, 0.3)


@program("keras-io: WGAN with weight clipping")
def constrained_weights() -> Made:
    """Weights that a constraint of its own clips after each update, and a unit norm."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5, "tanh", kernel_constraint=Constrained()),
            layers.Dense(3, "softmax", kernel_constraint="unit_norm", kernel_regularizer="l1"),
        ]
    )
    return Made(model, {"optimizer": adam(0.05), "loss": SPARSE}, fit(*DATA))


@program("keras-io: Few-Shot learning with Reptile")
def weights_moved_between_calls() -> Made:
    """Several calls of fit with weights set by hand between them."""

    def use(model: keras.Model) -> dict[str, Any]:
        losses = []
        for _ in range(2):
            before = model.get_weights()
            losses.append(model.fit(**fit(*DATA), verbose=0).history["loss"])
            after = model.get_weights()
            model.set_weights([b + 0.5 * (a - b) for a, b in zip(after, before, strict=True)])
        return {"losses": np.array(losses)}

    return Made(classifier(), {"optimizer": sgd(), "loss": SPARSE}, use=use)


class FasterBiases(keras.optimizers.SGD):
    """Takes twice the rate for weights with "bias" in their names."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        rate = 2 * learning_rate if "bias" in variable.name else learning_rate
        super().update_step(gradient, variable, rate)


@program("LARS, LAMB: other updates for biases, which their names tell")
def rates_by_names() -> Made:
    """An optimizer of one's own that looks at the names of the variables."""
    return Made(classifier(), {"optimizer": FasterBiases(0.1), "loss": SPARSE}, fit(*DATA))


@program("Keras guide: Writing a training loop from scratch in TensorFlow")
def loop_by_hand_after_fit() -> Made:
    """A loop of the user's own that goes on with the optimizer of the compiled model."""

    def use(model: keras.Model) -> dict[str, Any]:
        losses = [model.fit(**fit(*DATA), verbose=0).history["loss"]]
        weights = model.trainable_variables
        for _ in range(3):
            with tf.GradientTape() as tape:
                rows = keras.losses.sparse_categorical_crossentropy(DATA[1], model(DATA[0]))
                loss = tf.reduce_mean(rows)
            model.optimizer.apply(tape.gradient(loss, weights), weights)
        losses.append(model.fit(**fit(*DATA), verbose=0).history["loss"])
        return {"losses": np.array(losses)}

    return Made(classifier(), {"optimizer": adam(), "loss": SPARSE}, use=use)


class FineTuned(keras.Model):
    """A step that trains the last layer only."""

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        weights = self.layers[-1].trainable_variables
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def _two_layers(cls: type[keras.Model]) -> Any:
    inputs = keras.Input((4,))
    return cls(inputs, layers.Dense(3, "softmax")(layers.Dense(5, "tanh")(inputs)))


@program("keras-io: Fine-tuning a head with a train_step of one's own")
def optimizer_of_some_weights() -> Made:
    """A step whose only optimizer gets some of the trainable weights."""
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    return Made(_two_layers(FineTuned), {"optimizer": optimizer, "loss": SPARSE}, fit(*DATA))


class BuildsItsOptimizers(keras.Model):
    """A step that builds two optimizers by itself."""

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        first, last = (self.layers[i].trainable_variables for i in (1, 2))
        if not self.optimizer.built:
            self.optimizer.build(first)
            self.of_last.build(last)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, [*first, *last])
        self.optimizer.apply(gradients[:2])
        self.of_last.apply(gradients[2:])
        return {"loss": loss}


@program("TensorFlow guide: Customizing what happens in fit")
def optimizers_that_the_step_builds() -> Made:
    """A step that calls `build` of two optimizers before it uses them."""
    model = _two_layers(BuildsItsOptimizers)
    model.of_last = adam(0.02)
    return Made(model, {"optimizer": adam(), "loss": SPARSE}, fit(*DATA))

"""Programs in the manner of Keras' guides on `fit`, losses, weights and layers."""

from __future__ import annotations

from dataclasses import replace
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
    labels,
    sgd,
    tokens,
)
from tests.programs.registry import Made, program

CUSTOM_FIT = "Keras guide: Customizing what happens in fit() with TensorFlow"
BUILT_IN = "Keras guide: Training & evaluation with the built-in methods"
SUBCLASSING = "Keras guide: Making new layers and models via subclassing"
ONE = {"x": features(4), "y": features(1)}


def _functional(cls: type[keras.Model]) -> keras.Model:
    inputs = keras.Input((4,))
    return cls(inputs, layers.Dense(1)(layers.Dense(3, "tanh")(inputs)))


class AllMetrics(keras.Model):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted)
        return {m.name: m.result() for m in self.metrics}


@program(CUSTOM_FIT, "keras-io: A Vision Transformer without Attention")
def logs_of_all_metrics() -> Made:
    """A train_step that returns the result of every metric by its name, a dict among them."""
    return Made(
        _functional(AllMetrics),
        {"optimizer": adam(), "loss": "mse", "metrics": ["mae"]},
        fit(**ONE),
        evaluate={**ONE, "batch_size": BATCH},
    )


class OwnTrackers(keras.Model):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.loss_tracker, self.mae]

    def train_step(self, data: Any) -> Any:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.loss_fn(y, predicted, sample_weight=weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.loss_tracker.update_state(loss)
        self.mae.update_state(y, predicted, sample_weight=weight)
        return {"loss": self.loss_tracker.result(), "mae": self.mae.result()}

    def test_step(self, data: Any) -> Any:
        x, y = data
        predicted = self(x, training=False)
        self.loss_tracker.update_state(self.loss_fn(y, predicted))
        self.mae.update_state(y, predicted)
        return {m.name: m.result() for m in self.metrics}


@program(CUSTOM_FIT)
def own_trackers_and_weights() -> Made:
    """A train_step and a test_step with trackers of their own, and sample weights."""
    weight = np.linspace(0.2, 2.0, 30, dtype="float32")
    return Made(
        _functional(OwnTrackers),
        {"optimizer": adam()},
        fit(**ONE, sample_weight=weight, validation_data=(ONE["x"], ONE["y"])),
    )


class OwnSum(keras.Model):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            errors = [ops.mean(ops.square(predicted[name] - y[name])) for name in y]
            loss = sum(errors)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {**self.compute_metrics(x, y, predicted), "sum": loss}


@program(CUSTOM_FIT)
def several_losses_that_the_step_does_not_compute() -> Made:
    """A train_step that computes none of the compiled losses, whose logs it then has not."""
    inputs = keras.Input((4,))
    hidden = layers.Dense(3, "tanh")(inputs)
    model = OwnSum(inputs, {"first": layers.Dense(1)(hidden), "second": layers.Dense(2)(hidden)})
    given = (ONE["x"], {"first": ONE["y"], "second": features(2)})
    return Made(
        model,
        {
            "optimizer": sgd(),
            "loss": {"first": "mse", "second": "mae"},
            "metrics": {"first": "mae"},
        },
        fit(*given, validation_data=given),
        evaluate={"x": given[0], "y": given[1]},
    )


class OwnSumAndTest(OwnSum):
    def test_step(self, data: Any) -> Any:
        logs = super().test_step(data)
        if not hasattr(self, "size"):
            self.size = keras.metrics.Mean("size")
        self.size.update_state(ops.abs(self(data[0])["first"]))
        return {**logs, "size": self.size.result()}


@program(CUSTOM_FIT)
def losses_and_a_metric_of_the_test_step() -> Made:
    """A test_step that builds the losses and makes a metric, which the train_step then has not."""
    made = several_losses_that_the_step_does_not_compute()
    model = OwnSumAndTest(made.model.inputs, made.model.output)
    return replace(made, model=model)


class OtherLogs(keras.Model):
    def train_step(self, data: Any) -> Any:
        logs = dict(super().train_step(data))
        # "zero" comes before "number" in a history, and behind it in one sorted list.
        nested = {"twice": 2 * logs["loss"], "three": 3, "zero": 0}
        # Keras goes through the names in their order, so this is the loss of the history.
        parts = {"loss": 2 * logs["loss"]}
        others = {"number": 0.5, "whole": 2, "inner": nested, "steps": tf.constant(1)}
        return {"parts": parts, **logs, **others}


@program(CUSTOM_FIT)
def logs_of_many_kinds() -> Made:
    """A train_step that calls super() and adds Python numbers, whole numbers and a dict of logs."""
    return Made(_functional(OtherLogs), {"optimizer": sgd(), "loss": "mse"}, fit(**ONE))


class OddLogs(keras.Model):
    def train_step(self, data: Any) -> Any:
        logs = dict(super().train_step(data))
        return {**logs, "nothing": None, "text": "first", "parts": {"word": tf.constant("second")}}


@program("Keras: pythonify_logs")
def logs_of_none_and_texts() -> Made:
    """A train_step that returns None and texts among its logs."""

    def use(model: keras.Model) -> dict[str, Any]:
        history = model.fit(**fit(**ONE), verbose=0).history
        texts = [[str(value) for value in history[name]] for name in ("nothing", "text", "word")]
        assert texts == [["None"] * 2, ["b'first'"] * 2, ["b'second'"] * 2], texts
        return {"loss": history["loss"]}

    return Made(_functional(OddLogs), {"optimizer": sgd(), "loss": "mse"}, use=use)


class ComputeLoss(keras.Model):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tracker = keras.metrics.Mean(name="own")

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, *more: Any, **named: Any
    ) -> Any:
        loss = ops.mean(ops.square(y_pred - y)) + ops.sum(self.losses)
        self.tracker.update_state(loss)
        return loss

    def reset_metrics(self) -> None:
        self.tracker.reset_state()

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.tracker]


@program("Keras: Model.compute_loss", "keras-io: Knowledge Distillation")
def compute_loss_of_a_mean() -> Made:
    """A compute_loss of the model's own: a mean, a regularizer, and a tracker in it."""
    inputs = keras.Input((4,))
    hidden = layers.Dense(3, "tanh", kernel_regularizer="l2")(inputs)
    model = ComputeLoss(inputs, layers.Dense(1)(hidden))
    return Made(model, {"optimizer": adam()}, fit(**ONE))


class SumLoss(keras.Model):
    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, *more: Any, **named: Any
    ) -> Any:
        return ops.sum(ops.square(y_pred - y))


@program("Keras guide: Migrating to Keras 3")
def compute_loss_of_a_sum() -> Made:
    """A compute_loss of the model's own that is a sum over the rows."""
    return Made(_functional(SumLoss), {"optimizer": sgd(0.001)}, fit(**ONE))


class Trainer(keras.Model):
    def __init__(self, model: keras.Model) -> None:
        super().__init__()
        self.model = model
        self.loss_metric = keras.metrics.Mean(name="loss")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.loss_metric, self.accuracy]

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self.model(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
        gradients = tape.gradient(loss, self.model.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_weights, strict=True))
        self.loss_metric.update_state(loss)
        self.accuracy.update_state(y, predicted)
        return {"loss": self.loss_metric.result(), "accuracy": self.accuracy.result()}

    def test_step(self, data: Any) -> Any:
        x, y = data
        predicted = self.model(x, training=False)
        self.loss_metric.update_state(self.compute_loss(y=y, y_pred=predicted))
        self.accuracy.update_state(y, predicted)
        return {"loss": self.loss_metric.result(), "accuracy": self.accuracy.result()}

    def call(self, x: Any) -> Any:
        return self.model(x)


@program("keras-io: Trainer pattern")
def trainer_around_a_model() -> Made:
    """A model that holds the trained model and evaluates and predicts by it."""
    made = Trainer(classifier(layers.Dropout(0.3)))
    x, y = features(4), labels()
    return Made(
        made,
        {"optimizer": adam(), "loss": SPARSE},
        fit(x, y, validation_data=(x, y)),
        predict={"x": x, "batch_size": 7},
    )


class Endpoint(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.accuracy = keras.metrics.BinaryAccuracy(name="binary", threshold=0.0)

    def call(self, targets: Any, logits: Any) -> Any:
        self.add_loss(self.loss_fn(targets, logits))
        self.accuracy.update_state(targets, logits)
        return ops.sigmoid(logits)


@program("keras-io: Endpoint layer pattern", "keras-io: OCR model for reading Captchas", BUILT_IN)
def endpoint_layer() -> Made:
    """Targets as an input; a layer adds the loss and updates a metric; compile has no loss."""
    x, y = keras.Input((4,)), keras.Input((1,))
    model = keras.Model([x, y], Endpoint()(y, layers.Dense(1)(layers.Dense(3, "tanh")(x))))
    target = (features(1) > 0).astype("float32")
    return Made(model, {"optimizer": adam()}, fit([features(4), target]))


class ActivityMean(layers.Layer):
    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * ops.mean(inputs))
        return inputs


class ActivitySum(layers.Layer):
    def call(self, inputs: Any) -> Any:
        self.add_loss(0.01 * ops.sum(ops.square(inputs)))
        return inputs


@program(SUBCLASSING)
def added_loss_of_a_mean() -> Made:
    """A layer that adds the mean of what it sees to the loss."""
    return Made(
        classifier(ActivityMean()),
        {"optimizer": sgd(), "loss": SPARSE},
        fit(features(4), labels()),
    )


@program(BUILT_IN)
def added_loss_of_a_sum() -> Made:
    """A layer that adds the sum over all rows of what it sees to the loss."""
    return Made(
        classifier(ActivitySum()),
        {"optimizer": sgd(), "loss": SPARSE},
        fit(features(4), labels()),
    )


class CustomMSE(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        mse = ops.mean(ops.square(y_true - y_pred), axis=-1)
        return mse + 0.1 * ops.mean(ops.square(0.5 - y_pred), axis=-1)


class TruePositives(keras.metrics.Metric):
    def __init__(self, name: str = "true_positives") -> None:
        super().__init__(name=name)
        self.count = self.add_variable(shape=(), name="count", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        same = ops.argmax(y_true, axis=1) == ops.argmax(y_pred, axis=1)
        self.count.assign_add(ops.sum(ops.cast(same, "float32")))

    def result(self) -> Any:
        return self.count.value


@program(BUILT_IN)
def own_loss_class_and_metric_class() -> Made:
    """A Loss with a value a row, and a Metric that counts."""
    return Made(
        classifier(),
        {"optimizer": keras.optimizers.RMSprop(0.01), "loss": CustomMSE()}
        | {"metrics": [TruePositives()]},
        fit(features(4), np.eye(CLASSES, dtype="float32")[labels()]),
    )


class BroadcastingPositives(TruePositives):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        best = ops.reshape(ops.argmax(y_pred, axis=1), (-1, 1))
        same = ops.cast(ops.cast(y_true, "int32") == ops.cast(best, "int32"), "float32")
        self.count.assign_add(ops.sum(same))


@program(BUILT_IN)
def metric_that_compares_each_row_with_all() -> Made:
    """A Metric that broadcasts targets of rank 1 against predictions of rank 2: rows × rows."""
    return Made(
        classifier(),
        {"optimizer": sgd(), "loss": SPARSE, "metrics": [BroadcastingPositives()]},
        fit(features(4), labels()),
    )


def _two_outputs() -> keras.Model:
    image, series = keras.Input((3, 2), name="image"), keras.Input((4,), name="series")
    joined = layers.concatenate([layers.Flatten()(image), layers.Dense(3, "tanh")(series)])
    score = layers.Dense(1, name="score")(joined)
    return keras.Model(
        [image, series], {"score": score, "kind": layers.Dense(3, name="kind")(joined)}
    )


@program(BUILT_IN, "Keras guide: The Functional API")
def several_inputs_and_outputs_by_name() -> Made:
    """Dicts of inputs and outputs, with losses, loss weights and metrics by name."""
    x = {"image": features(3, 2), "series": features(4)}
    y = {"score": features(1), "kind": np.eye(3, dtype="float32")[labels()]}
    return Made(
        _two_outputs(),
        {
            "optimizer": adam(),
            "loss": {
                "score": keras.losses.MeanSquaredError(),
                "kind": keras.losses.CategoricalCrossentropy(from_logits=True),
            },
            "loss_weights": {"score": 2.0, "kind": 0.5},
            "metrics": {"score": ["mae"], "kind": [keras.metrics.CategoricalAccuracy()]},
        },
        fit(x, y),
        evaluate={"x": x, "y": y, "batch_size": 7},
        predict={"x": x, "batch_size": 7},
    )


@program(BUILT_IN, "keras-io: Imbalanced classification: credit card fraud detection")
def class_weights_and_validation_split() -> Made:
    """Class weights with arrays, and a validation split."""
    return Made(
        classifier(),
        {"optimizer": sgd(), "loss": SPARSE, "weighted_metrics": ["accuracy"]},
        fit(
            features(4),
            labels(),
            class_weight={0: 1.0, 1: 5.0, 2: 0.5},
            validation_split=0.3,
            validation_freq=2,
        ),
    )


@program(BUILT_IN, "Keras guide: Multi-GPU distributed training with TensorFlow")
def weights_of_rows_in_a_dataset() -> Made:
    """A Dataset of (x, y, weight), with validation of a number of steps."""
    weight = np.linspace(0.0, 3.0, 30, dtype="float32")
    data = batches(features(4), labels(), weight)
    return Made(
        classifier(),
        {"optimizer": sgd(), "loss": SPARSE, "weighted_metrics": ["accuracy"]},
        fit(data, validation_data=data, validation_steps=1),
    )


@program(
    "Keras guide: Transfer learning & fine-tuning",
    "keras-io: Image Classification using BigTransfer (BiT)",
    "keras-io: FixRes: Fixing train-test resolution discrepancy",
)
def frozen_then_fine_tuned() -> Made:
    """A frozen base with BatchNormalization in inference mode; then unfrozen and compiled again."""
    inner = keras.Input((4,))
    base = keras.Model(inner, layers.BatchNormalization()(layers.Dense(5, "tanh")(inner)))
    base.trainable = False
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(CLASSES)(base(inputs, training=False)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    given = fit(features(4), labels())

    def use(model: keras.Model) -> dict[str, Any]:
        first = model.fit(**given, verbose=0).history["loss"]
        base.trainable = True
        with model.distribute_strategy.scope():
            model.compile(sgd(0.01), loss, metrics=["accuracy"])
        return {"first": first, **model.fit(**given, verbose=0).history}

    return Made(model, {"optimizer": adam(), "loss": loss}, use=use)


@program(
    BUILT_IN,
    "keras-io: Few-Shot learning with Reptile",
    "keras-io: Deep Q-learning",
    "Keras guide: Writing a training loop from scratch in TensorFlow",
)
def batches_by_hand() -> Made:
    """A loop of train_on_batch, test_on_batch and predict_on_batch."""
    x, y = features(4), labels()

    def use(model: keras.Model) -> dict[str, Any]:
        logs = [
            model.train_on_batch(x[at : at + 7], y[at : at + 7], return_dict=True)
            for at in range(0, 28, 7)
        ]
        found = {f"{key}/{i}": value for i, log in enumerate(logs) for key, value in log.items()}
        found["test"] = model.test_on_batch(x[:10], y[:10])
        return {**found, "predicted": model.predict_on_batch(x[:5])}

    return Made(
        classifier(), {"optimizer": adam(), "loss": SPARSE, "metrics": ["accuracy"]}, use=use
    )


class PredictStep(keras.Model):
    def predict_step(self, data: Any) -> Any:
        x = data[0] if isinstance(data, tuple) else data
        return ops.argmax(self(x, training=False), axis=-1), ops.shape(x)[1] * ops.ones_like(x)

    def test_step(self, data: Any) -> Any:
        x, y = data
        predicted = self(x, training=False)
        self.compute_loss(x, y, predicted)
        return {**self.compute_metrics(x, y, predicted), "spread": ops.mean(ops.square(predicted))}


@program("keras-io: Graph attention network", "Keras: Model.predict_step")
def own_predict_step() -> Made:
    """A predict_step that returns several things, and a test_step that adds a mean to the logs."""
    inputs = keras.Input((4,))
    model = PredictStep(inputs, layers.Dense(CLASSES, "softmax")(inputs))
    x, y = features(4), labels()
    return Made(
        model,
        {"optimizer": sgd(), "loss": SPARSE, "metrics": ["accuracy"]},
        fit(x, y, epochs=1),
        evaluate={"x": x, "y": y, "batch_size": BATCH},
        predict={"x": x, "batch_size": 7},
    )


class Block(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers.Dense(4, "tanh"), layers.Dense(1)

    def call(self, inputs: Any, training: bool = False) -> Any:
        hidden = self.first(inputs)
        return self.second(keras.random.dropout(hidden, 0.4, seed=3) if training else hidden)


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [Block() for _ in range(2)]
        self.mix = layers.MultiHeadAttention(1, 2)

    def call(self, inputs: Any, training: bool = False) -> Any:
        series = ops.expand_dims(inputs, -1)
        mixed = ops.squeeze(self.mix(series, series), -1)
        return sum(block(mixed, training=training) for block in self.blocks)


@program(
    SUBCLASSING,
    "Keras guide: Transformers from scratch",
    "keras-io: Writing Keras Models With TensorFlow NumPy",
    "keras-io: Involutional neural networks",
)
def subclassed_and_not_built() -> Made:
    """A subclassed model whose layers are built by the first batch, with a seeded dropout."""
    return Made(
        Subclassed(), {"optimizer": sgd(), "loss": "mse"}, fit(**ONE), predict={"x": ONE["x"]}
    )


@program(
    "Keras guide: Working with RNNs",
    "keras-io: Text classification from scratch",
    "keras-io: Character-level text generation with LSTM",
    "keras-io: Sequence to sequence learning for performing number addition",
    "keras-io: Bidirectional LSTM on IMDB",
    "Keras guide: Understanding masking & padding",
)
def recurrent_with_masks() -> Made:
    """Masked tokens through a bidirectional LSTM, one target for each token."""
    inputs = keras.Input((7,), dtype="int32")
    embedded = layers.Embedding(9, 3, mask_zero=True)(inputs)
    hidden = layers.Bidirectional(layers.LSTM(2, return_sequences=True))(embedded)
    outputs = layers.TimeDistributed(layers.Dense(9, "softmax"))(hidden)
    x = tokens(7)
    return Made(
        keras.Model(inputs, outputs),
        {"optimizer": adam(), "loss": SPARSE, "metrics": ["accuracy"]},
        fit(x, np.roll(x, -1, 1)),
    )


@program("Keras guide: Save, serialize, and export models", "Keras guide: Transfer learning")
def copies_that_are_trained_on() -> Made:
    """Copies of a trained model and of its optimizer, made from their configurations."""

    def after(model: keras.Model) -> dict[str, Any]:
        found = {}
        copies = {
            "clone": keras.models.clone_model(model),
            "from_config": type(model).from_config(model.get_config()),
        }
        for name, copy in copies.items():
            copy.set_weights(model.get_weights())
            copy.compile(type(model.optimizer).from_config(model.optimizer.get_config()), SPARSE)
            losses = copy.fit(**fit(features(4), labels()), verbose=0).history["loss"]
            found |= {name: np.array(losses), f"{name}/predicted": copy.predict(features(4))}
        return found

    made = Made(classifier(), {"optimizer": adam(), "loss": SPARSE}, fit(features(4), labels()))
    made.after = after
    return made

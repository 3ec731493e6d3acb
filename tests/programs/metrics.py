"""Metrics: other keys, states that do not add up, functions, layers that hold some."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.programs.common import BATCH, SPARSE, batches, classifier, features, fit, labels, sgd
from tests.programs.registry import Made, program

BINARY = (labels() > 0).astype("float32")[:, None]


def _evaluated(model: keras.Model, data: tf.data.Dataset) -> Made:
    """Returns a program that evaluates a model, and trains nothing."""

    def use(model: keras.Model) -> dict[str, Any]:
        found: dict[str, Any] = model.evaluate(data, verbose=0, return_dict=True)
        return found

    return Made(model, {"optimizer": sgd()}, use=use)


class OtherKeys(keras.Model):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.total = keras.metrics.Mean(name="total_loss")
        self.auc = keras.metrics.AUC(name="auc", num_thresholds=20)
        self.precision = keras.metrics.Precision(name="precision")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.total, self.auc, self.precision]

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = tf.reduce_mean((predicted - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.total.update_state(loss)
        self.auc.update_state(y, predicted)
        self.precision.update_state(y, predicted)
        both = self.auc.result() * self.precision.result()
        return {"loss": self.total.result(), "area": self.auc.result(), "both": both}


@program("keras-io: Variational AutoEncoder", "keras-io: Image Captioning")
def results_under_other_keys() -> Made:
    """Results of metrics under other keys than their names, and a product of two of them."""
    inputs = keras.Input((4,))
    model = OtherKeys(inputs, layers.Dense(1, "sigmoid")(inputs))
    return Made(model, {"optimizer": sgd()}, fit(features(4), BINARY))


@program(
    "keras-io: Imbalanced classification: credit card fraud detection",
    "TensorFlow tutorial: imbalanced data",
    "keras-io: English speaker accent recognition using Transfer Learning",
    "keras-io: Electroencephalogram Signal Classification for action identification",
    "Keras guide: The Sequential model",
)
def counts_and_areas() -> Made:
    """AUC, Precision, Recall, F1 and counts of a compiled model, weighted and not."""
    names = ["AUC", "Precision", "Recall", "TruePositives", "FalseNegatives"]
    made = [getattr(keras.metrics, name)(name=name.lower()) for name in names]
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1, "sigmoid")])
    return Made(
        model,
        {
            "optimizer": sgd(),
            "loss": "binary_crossentropy",
            "metrics": [*made, keras.metrics.F1Score(name="f1", threshold=0.5)],
            "weighted_metrics": [keras.metrics.AUC(name="weighted"), "accuracy"],
        },
        fit(features(4), BINARY, class_weight={0: 1.0, 1: 3.0}),
        evaluate={"x": features(4), "y": BINARY, "batch_size": 7},
    )


class Largest(keras.metrics.Metric):
    def __init__(self, name: str = "largest") -> None:
        super().__init__(name=name)
        self.value = self.add_variable(shape=(), name="value", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(ops.maximum(self.value, ops.max(y_pred)))

    def result(self) -> Any:
        return self.value.value


@program("Keras: Metric subclass")
def metric_that_keeps_the_largest() -> Made:
    """A metric whose state is a maximum, which parts of a batch do not add up to."""
    return Made(
        classifier(),
        {"optimizer": sgd(), "loss": SPARSE, "metrics": [Largest()]},
        fit(features(4), labels()),
    )


class Last(keras.metrics.Metric):
    """The mean of the last batch's predictions."""

    def __init__(self, name: str = "last") -> None:
        super().__init__(name=name)
        self.value = self.add_variable(shape=(), name="value", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(ops.mean(y_pred))

    def result(self) -> Any:
        return self.value.value


class OverwrittenStates(keras.Model):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.last = Last()
        self.by_batch = keras.metrics.Mean(name="by_batch")
        self.rows = keras.metrics.Mean(name="rows")
        self.area = keras.metrics.AUC(name="area", num_thresholds=20)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            losses = tf.square(predicted - y)
            loss = tf.reduce_mean(losses)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.by_batch.reset_state()
        self.by_batch.update_state(losses)
        self.rows.update_state(predicted)
        self.area.reset_state()
        self.area.update_state(y, predicted)
        self.last.update_state(y, predicted)
        return {
            "loss": self.by_batch.result(),
            "twice": 2.0 * self.rows.result(),
            "total": self.rows.total + 1.0,
            "mean": self.rows.total / self.rows.count,
            "area": self.area.result(),
            "last": self.last.result(),
        }


@program("Keras: Metric subclass", "keras-io: Simple custom layer example: Antirectifier")
def overwritten_states_of_metrics() -> Made:
    """States of metrics that a step sets anew or computes with, in a batch of one row."""
    inputs = keras.Input((4,))
    model = OverwrittenStates(inputs, layers.Dense(1, "sigmoid")(inputs))
    data = fit(features(4, rows=BATCH + 1), BINARY[: BATCH + 1])
    return Made(model, {"optimizer": sgd()}, data)


class OfOtherValues(keras.Model):
    """Gives Keras' metrics selections and mixtures of rows."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.of_rows = {
            name: [
                keras.metrics.Precision(name=f"{name}_precision"),
                keras.metrics.AUC(name=f"{name}_area", num_thresholds=20),
                keras.metrics.F1Score(name=f"{name}_f1", threshold=0.5),
                keras.metrics.BinaryIoU(name=f"{name}_iou"),
                keras.metrics.RootMeanSquaredError(name=f"{name}_error"),
            ]
            for name in ("rows", "first", "scaled", "added", "weighted", "one")
        }

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [metric for found in self.of_rows.values() for metric in found]

    def test_step(self, data: Any) -> Any:
        x, y = data
        p = self(x)
        values: dict[str, Any] = {
            "rows": (y, p),
            "first": (y[:5], p[:5]),
            "scaled": (y, p / tf.reduce_max(p)),
            "added": (y, tf.sigmoid(tf.cumsum(p - 0.5, 0))),
            "weighted": (y, p, p[:, 0] / tf.reduce_sum(p)),
            "one": ([[tf.reduce_max(y)]], [[tf.reduce_mean(p)]]),
        }
        for name, found in self.of_rows.items():
            for metric in found:
                metric.update_state(*values[name])
        return {metric.name: metric.result() for metric in self.metrics}


@program("Keras guide: Customizing what happens in `fit()` with TensorFlow")
def metrics_of_selected_and_mixed_rows() -> Made:
    """Keras' metrics of the first rows, of values scaled by the batch, of sums, of one value."""
    inputs = keras.Input((4,))
    model = OfOtherValues(inputs, layers.Dense(1, "sigmoid")(inputs))
    data = batches(features(4), BINARY)
    return _evaluated(model, data)


class WeightsOfTrackers(keras.Model):
    """Updates trackers with one weight for a batch, or with weights that the batch decides."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        names = ("two", "rows", "more", "inverse", "root", "sum", "share", "each", "all")
        self.trackers = {name: keras.metrics.Mean(name=name) for name in names}
        self.error = keras.metrics.MeanAbsoluteError(name="error")
        self.f1 = keras.metrics.F1Score(threshold=0.5, name="f1")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [*self.trackers.values(), self.error, self.f1]

    def test_step(self, data: Any) -> Any:
        x, y = data
        p = self(x)
        errors = tf.abs(y - p)[:, 0]
        n = tf.cast(tf.shape(y)[0], tf.float32)
        weighted = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        values: dict[str, Any] = {
            "two": (errors, 2.0),
            "rows": (errors, n),
            "more": (tf.reduce_mean(errors), n + 5.0),
            "inverse": (tf.reduce_sum(errors), 1.0 / n),
            "root": (weighted(y, p, 2.0), tf.sqrt(n)),
            "sum": (tf.reduce_mean(errors), tf.reduce_sum(y) + 1.0),
            "share": (tf.reduce_mean(errors), tf.reduce_sum(y) / n),
            "each": (errors, (y[:, 0] + 1.0) / tf.reduce_sum(y + 1.0)),
            "all": (errors, tf.reduce_sum(p)),
        }
        for name, tracker in self.trackers.items():
            tracker.update_state(values[name][0], sample_weight=values[name][1])
        self.error.update_state(y, p, sample_weight=3.0)
        self.f1.update_state(y, p)
        return {m.name: m.result() for m in self.metrics}


@program("Keras: sample_weight of a metric", "keras-io: Deep Deterministic Policy Gradient")
def weights_of_trackers() -> Made:
    """Trackers with one weight for a batch: constants, counts, sums; the last batch has one row."""
    inputs = keras.Input((4,))
    model = WeightsOfTrackers(inputs, layers.Dense(1, "sigmoid")(inputs))
    data = batches(features(4, rows=BATCH + 1), BINARY[: BATCH + 1])
    return _evaluated(model, data)


class BuiltInTheStep(keras.Model):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.f1 = keras.metrics.F1Score(threshold=0.5, name="f1")

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = tf.reduce_mean(tf.square(predicted - y))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.f1.update_state(y, predicted)
        return {"loss": loss, "f1": self.f1.result()[0]}


@program("Keras: a metric that is built by its first update")
def metric_built_in_the_step() -> Made:
    """A metric that has no variables before the train_step updates it."""
    inputs = keras.Input((4,))
    model = BuiltInTheStep(inputs, layers.Dense(1, "sigmoid")(inputs))
    return Made(model, {"optimizer": sgd()}, fit(features(4), BINARY))


class PerBatch(keras.metrics.Metric):
    """The mean over batches of the accuracy of a batch; counts batches."""

    def __init__(self, name: str = "per_batch") -> None:
        super().__init__(name=name)
        self.total = self.add_variable(shape=(), name="total", initializer="zeros")
        self.batches = self.add_variable(shape=(), name="batches", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        best = ops.cast(ops.argmax(y_pred, -1), "int32")
        same = ops.cast(ops.reshape(y_true, (-1,)), "int32") == best
        self.total.assign_add(ops.mean(ops.cast(same, "float32")))
        self.batches.assign_add(1.0)

    def result(self) -> Any:
        return self.total / self.batches


@program("keras-io: Semantic segmentation with SegFormer")
def metric_that_counts_batches() -> Made:
    """A metric that adds a mean for each batch and divides by the number of batches."""
    return Made(
        classifier(),
        {"optimizer": sgd(), "loss": SPARSE, "metrics": [PerBatch()]},
        fit(features(4), labels()),
    )


class NumberOfBatches(PerBatch):
    def result(self) -> Any:
        return self.batches.value


@program("Keras: Metric subclass")
def metric_that_is_the_number_of_batches() -> Made:
    """A metric that is how often it was updated."""
    return Made(
        classifier(),
        {"optimizer": sgd(), "loss": SPARSE, "metrics": [NumberOfBatches()]},
        fit(features(4), labels()),
    )


def _spread(y_true: Any, y_pred: Any) -> Any:
    return ops.std(y_pred)


def _share_of_first(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.cast(ops.argmax(y_pred, -1) == 0, "float32"))


@program("Keras guide: Training & evaluation with the built-in methods")
def functions_of_one_number_as_metrics() -> Made:
    """Metrics that are functions of one number: a mean, a standard deviation over the batch."""
    x, y = features(4), labels()
    return Made(
        classifier(),
        {"optimizer": sgd(), "loss": SPARSE, "metrics": [_spread, _share_of_first]},
        fit(x, y, validation_data=(x, y)),
    )


class Watching(layers.Layer):
    """Tracks the size of what it sees in a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.size = keras.metrics.Mean(name="size")

    def call(self, x: Any) -> Any:
        self.size.update_state(ops.mean(ops.square(x)))
        return x


@program("Keras: add_metric of former versions")
def metric_held_by_a_layer() -> Made:
    """A layer with a metric that its call updates by one number a batch."""
    return Made(
        classifier(Watching()),
        {"optimizer": sgd(), "loss": SPARSE, "metrics": ["accuracy"]},
        fit(features(4), labels()),
    )


class MeanOfScalars(keras.Model):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.trackers = [keras.metrics.Mean(name=n) for n in ("mean", "part", "both")]

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return self.trackers

    def test_step(self, data: Any) -> Any:
        x, y = data
        predicted = self(x)
        right = tf.cast(tf.equal(tf.cast(y, tf.int64), tf.argmax(predicted, 1)), tf.float32)
        rows = tf.cast(tf.shape(x)[0], tf.float32)
        values = [tf.reduce_mean(right), tf.reduce_sum(right) / rows]
        values.append(0.5 * (tf.reduce_mean(right) + tf.reduce_mean(predicted)))
        for tracker, value in zip(self.trackers, values, strict=True):
            tracker.update_state(value)
        return {m.name: m.result() for m in self.trackers}


class LargestOfBatch(MeanOfScalars):
    def test_step(self, data: Any) -> Any:
        predicted = self(data[0])
        self.trackers[0].update_state(tf.reduce_max(predicted))
        self.trackers[1].update_state(tf.shape(predicted)[0])
        self.trackers[2].update_state(tf.math.reduce_std(predicted))
        return {m.name: m.result() for m in self.trackers}


@program("keras-io: Deep Deterministic Policy Gradient")
def trackers_of_means_of_a_batch() -> Made:
    """Trackers of a number a batch in a test_step: means over rows, by three ways."""
    return _trackers(MeanOfScalars)


@program("keras-io: Deep Deterministic Policy Gradient")
def trackers_of_other_numbers_of_a_batch() -> Made:
    """Trackers of a number a batch in a test_step: the largest, the rows, a standard deviation."""
    return _trackers(LargestOfBatch)


def _trackers(cls: type[MeanOfScalars]) -> Made:
    inputs = keras.Input((4,))
    model = cls(inputs, layers.Dense(3, "softmax")(inputs))
    data = batches(features(4), labels())
    return _evaluated(model, data)


class Segmenter(keras.metrics.MeanIoU):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return super().update_state(y_true, ops.argmax(y_pred, -1), sample_weight)


@program(
    "keras-io: Image segmentation with a U-Net-like architecture",
    "keras-io: Multiclass semantic segmentation using DeepLabV3+",
)
def confusion_matrix_of_pixels() -> Made:
    """A MeanIoU of classes of pixels, a top-k accuracy and a cosine similarity."""
    x = features(3, 4)
    y = np.random.default_rng(8).integers(0, 3, (30, 3)).astype("int32")
    model = keras.Sequential([keras.Input((3, 4)), layers.Dense(3, "softmax")])
    metrics = [Segmenter(3, name="iou"), keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")]
    return Made(model, {"optimizer": sgd(), "loss": SPARSE, "metrics": metrics}, fit(x, y))


class LabelErrors(keras.metrics.Metric):
    """The edit distances between the labels and the labels that CTC reads, per label."""

    def __init__(self) -> None:
        super().__init__(name="label_errors")
        self.errors = self.add_weight(shape=(), initializer="zeros")
        self.labels = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        lengths = tf.fill([tf.shape(y_pred)[0]], tf.shape(y_pred)[1])
        decoded, _ = tf.nn.ctc_greedy_decoder(tf.transpose(y_pred, (1, 0, 2)), lengths)
        truth = tf.sparse.from_dense(tf.cast(y_true, tf.int64))
        self.errors.assign_add(tf.reduce_sum(tf.edit_distance(decoded[0], truth, normalize=False)))
        self.labels.assign_add(tf.cast(tf.size(y_true), tf.float32))

    def result(self) -> Any:
        return self.errors / self.labels


@program("keras-io: Automatic Speech Recognition using CTC")
def label_errors_of_read_sequences() -> Made:
    """A metric of edit distances, whose rank TensorFlow does not know."""
    y = np.random.default_rng(8).integers(1, 4, (30, 2)).astype("int32")
    model = keras.Sequential([keras.Input((5, 4)), layers.Dense(5)])
    compiled = {"optimizer": sgd(), "loss": _mean_square, "metrics": [LabelErrors()]}
    return Made(model, compiled, fit(features(5, 4), y))


def _mean_square(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y_pred), axis=(1, 2))


class MakesMetrics(keras.Model):
    """A step that makes a metric for each value when it first sees the value's name."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.trackers: dict[str, keras.metrics.Metric] = {}

    def logged(self, values: dict[str, Any], rows: Any) -> dict[str, Any]:
        for name, value in values.items():
            if name not in self.trackers:
                self.trackers[name] = keras.metrics.Mean(name=name)
            self.trackers[name].update_state(value, sample_weight=rows)
        return {name: tracker.result() for name, tracker in self.trackers.items()}

    def values_of(self, x: Any, y: Any) -> dict[str, Any]:
        found = self(x)
        loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, found))
        return {"loss": loss, "largest": tf.reduce_max(found), "spread": tf.math.reduce_std(found)}

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            values = self.values_of(x, y)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(values["loss"], weights), weights)
        return self.logged(values, tf.shape(x)[0])

    def test_step(self, data: Any) -> Any:
        x, y = data
        return self.logged(self.values_of(x, y), tf.shape(x)[0])


@program("bayesflow: ContinuousApproximator with the metrics of its networks")
def metrics_made_by_the_step() -> Made:
    """Metrics that the train_step and the test_step make when they are first traced."""
    inputs = keras.Input((4,))
    model = MakesMetrics(inputs, layers.Dense(3, "softmax")(layers.Dense(5, "tanh")(inputs)))
    data = {"x": features(4), "y": labels()}
    return Made(
        model,
        {"optimizer": sgd()},
        fit(**data, validation_data=(data["x"][:11], data["y"][:11])),
        evaluate={**data, "batch_size": BATCH},
    )


class Distances(keras.metrics.Mean):
    """A mean of distances between texts of tokens, which NumPy computes."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        found = np.argmax(np.asarray(y_pred), -1)
        return super().update_state(np.abs(found - np.asarray(y_true)[:, 0]))


@program("KerasHub: EditDistance with run_eagerly=True")
def metric_by_numpy_in_eager_mode() -> Made:
    """A metric that needs the values of tensors, in eager mode."""
    return Made(
        classifier(),
        {
            "optimizer": sgd(),
            "loss": SPARSE,
            "metrics": [Distances(name="distance"), "accuracy"],
            "run_eagerly": True,
        },
        fit(features(4), labels()[:, None]),
        evaluate={"x": features(4), "y": labels()[:, None], "batch_size": BATCH},
    )


class Tracked(keras.Sequential):
    """A step that updates a metric which the program has given the model."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.tracked.update_state(y, self(x))
        # Keras adds the results of all metrics to the logs.
        return super().train_step(data)


@program("Keras: a metric that makes its variables in its first update")
def metric_given_from_outside() -> Made:
    """A metric of the program, whose variables its first update in a step makes."""
    model = Tracked([keras.Input((4,)), layers.Dense(3)])
    model.tracked = keras.metrics.R2Score()
    return Made(model, {"optimizer": sgd(), "loss": "mse"}, fit(features(4), features(3)))

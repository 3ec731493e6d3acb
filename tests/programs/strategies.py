"""Programs whose steps ask for the strategy, as code that was written for tf.distribute does.

On one device there is one replica. All of these programs have the values of one device.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tests.programs.common import adam, classifier, features, fit, labels
from tests.programs.registry import Made, program

X, Y = features(4), labels()
GUIDE = "TensorFlow tutorial: Custom training with tf.distribute.Strategy"


def _errors(y: Any, outputs: Any) -> Any:
    classes = tf.one_hot(tf.cast(tf.reshape(y, [-1]), tf.int32), 3)
    return tf.reduce_sum(tf.square(classes - outputs), -1)


class Asks(keras.Model):
    """A classifier whose steps compute the loss by `of`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = classifier()
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, x: Any) -> Any:
        return self.net(x)

    def of(self, errors: Any) -> Any:
        raise NotImplementedError

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.of(_errors(y, self(x, training=True)))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.mean.update_state(loss)
        return {"mean": self.mean.result()}

    def test_step(self, data: Any) -> Any:
        x, y = data
        loss = self.of(_errors(y, self(x)))
        self.mean.update_state(loss)
        return {"mean": self.mean.result(), "loss_of_step": loss}


def _asks(cls: type[Asks], **of_compile: Any) -> Made:
    evaluated = {"x": X, "y": Y, "batch_size": 16}
    predicted = {"x": X, "batch_size": 7}
    return Made(cls(), {"optimizer": adam(), **of_compile}, fit(X, Y), evaluated, predicted)


class AsksInEvaluations(Asks):
    """A model whose train_step is Keras' own."""

    def train_step(self, data: Any) -> Any:
        return keras.Model.train_step(self, data)


class DividesByReplicas(Asks):
    def of(self, errors: Any) -> Any:
        return tf.reduce_mean(errors) / tf.distribute.get_strategy().num_replicas_in_sync


@program(GUIDE)
def loss_divided_by_the_replicas() -> Made:
    """A loss that the steps divide by the number of replicas."""
    return _asks(DividesByReplicas)


@program("Keras: compile(run_eagerly=True), with a loss divided by the replicas")
def loss_divided_by_the_replicas_in_eager_mode() -> Made:
    """A loss that eager steps divide by the number of replicas."""
    return _asks(DividesByReplicas, run_eagerly=True)


def _share(y: Any, outputs: Any) -> Any:
    return _errors(y, outputs) / tf.distribute.get_strategy().num_replicas_in_sync


class Outputs(keras.Model):
    """A classifier whose outputs have the number of replicas as a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.net = classifier()

    def call(self, x: Any) -> Any:
        factor = 2.0 if tf.distribute.has_strategy() else 1.0
        return self.net(x) * factor * tf.distribute.get_strategy().num_replicas_in_sync


@program("a loss and a metric that divide by the number of replicas")
def parts_that_count_the_replicas() -> Made:
    """A loss, a metric and the outputs of a model ask for the number of replicas."""
    return Made(
        Outputs(),
        {"optimizer": adam(), "loss": _share, "metrics": [_share]},
        fit(X, Y, validation_data=(X, Y)),
        {"x": X, "y": Y, "batch_size": 16},
        {"x": X, "batch_size": 7},
    )


class Averages(Asks):
    def of(self, errors: Any) -> Any:
        penalty = tf.nn.scale_regularization_loss([tf.reduce_sum(w**2) for w in self.weights[:2]])
        return tf.nn.compute_average_loss(errors) + 0.01 * penalty


@program(GUIDE)
def average_loss_without_a_batch_size() -> Made:
    """tf.nn.compute_average_loss without the size of the batch, and scale_regularization_loss."""
    return _asks(Averages)


class AveragesOfAllRows(AsksInEvaluations, Averages):
    def of(self, errors: Any) -> Any:
        # No operation tells how the errors depend on the rows.
        errors = tf.ensure_shape(tf.numpy_function(lambda e: e, [errors], tf.float32), [None])
        return Averages.of(self, errors)


@program(GUIDE)
def average_loss_of_errors_that_are_not_understood() -> Made:
    """tf.nn.compute_average_loss in a test_step that each replica computes with all rows."""
    return _asks(AveragesOfAllRows, loss="sparse_categorical_crossentropy")


class AddsUp(Asks):
    def of(self, errors: Any) -> Any:
        context = tf.distribute.get_replica_context()
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(errors))
        rows = context.all_reduce("sum", tf.cast(tf.size(errors), tf.float32))
        number = tf.cast(context.replica_id_in_sync_group, tf.float32)
        return total / rows * (1.0 + number)


@program("Horovod style: sums over the replicas by ReplicaContext.all_reduce")
def sums_over_the_replicas() -> Made:
    """Evaluations that add values up over the replicas by themselves."""
    return _asks(AddsUp)


class AddsUpMeans(Asks):
    def of(self, errors: Any) -> Any:
        context = tf.distribute.get_replica_context()
        [mean] = tf.nest.map_structure(
            lambda value: context.all_reduce("sum", value), [tf.reduce_mean(errors)]
        )
        return mean / context.num_replicas_in_sync * context.all_reduce("sum", 1.0)


@program("Horovod style: means over the replicas, with compile(run_eagerly=True)")
def means_over_the_replicas_in_eager_mode() -> Made:
    """Eager steps that take means over the replicas by themselves."""
    return _asks(AddsUpMeans, run_eagerly=True)


@program("Horovod style: means over the replicas")
def means_over_the_replicas() -> Made:
    """Steps that take means over the replicas by themselves, of tensors and of numbers."""
    return _asks(AddsUpMeans)


class Gathers(AsksInEvaluations):
    def of(self, errors: Any) -> Any:
        context = tf.distribute.get_replica_context()
        return tf.reduce_max(context.all_gather(errors, axis=0)) + tf.reduce_mean(errors)


@program("evaluations with ReplicaContext.all_gather")
def rows_gathered_in_a_test_step() -> Made:
    """A test_step that gathers rows over the replicas by itself."""
    return _asks(Gathers, loss="sparse_categorical_crossentropy")


class Merges(AsksInEvaluations):
    def of(self, errors: Any) -> Any:
        context = tf.distribute.get_replica_context()
        return context.merge_call(
            lambda strategy, total: strategy.reduce("SUM", total, axis=None),
            args=(tf.reduce_sum(errors),),
        )


@program("a test_step with ReplicaContext.merge_call", expects="the step calls merge_call")
def values_merged_in_a_test_step() -> Made:
    """A test_step that adds values up over the replicas by merge_call."""
    return _asks(Merges, loss="sparse_categorical_crossentropy")


class MergesInTraining(Merges):
    def train_step(self, data: Any) -> Any:
        return Asks.train_step(self, data)


@program(
    "a train_step with ReplicaContext.merge_call",
    # Between workers TensorFlow has no gradient for what `merge_call` exchanges.
    expects="differs from one device|No gradients provided",
)
def values_merged_in_a_train_step() -> Made:
    """A train_step that adds values up over the replicas by merge_call."""
    return _asks(MergesInTraining)

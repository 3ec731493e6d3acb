"""Returns results of Keras alone and of tfmulti, which are the reasons for `keras_patches`."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support.behaviours.common import X, fit, here, on_all_replicas
from tfmulti import prepare
from tfmulti.distribution.replica_slice import ReplicaSlice, computing
from tfmulti.keras_patches import installation
from tfmulti.keras_patches.optimizers import take_reduced_gradients


def plain_model(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "softmax")])
        model.compile(keras.optimizers.SGD(0.5, **options), "sparse_categorical_crossentropy")
    return model


def fit_by_keras() -> Any:
    return fit(plain_model())


def fit_by_keras_with_an_uneven_first_batch() -> Any:
    return fit(plain_model(), batch_size=25)


def _slice(weight: float, rows: int) -> ReplicaSlice:
    count = tf.constant(rows, tf.int64)
    return ReplicaSlice(
        tf.constant(weight), count, tf.constant(0, tf.int64), 2 * count, rows, False, True
    )


def mean_squared_error_on_a_replica() -> Any:
    """Returns the loss of errors of 1 on one of two replicas, as Keras and as tfmulti scale it."""
    installation.install()

    def losses() -> Any:
        loss = keras.losses.MeanSquaredError()
        with computing(_slice(0.5, 4)):
            patched = loss(tf.ones((4, 1)), tf.zeros((4, 1)))
        return loss(tf.ones((4, 1)), tf.zeros((4, 1))), patched

    pair = tf.function(lambda: here.strategy.run(losses))()
    return [float(here.strategy.experimental_local_results(value)[0]) for value in pair]


def _weights_after_a_step(prepared: bool, *layers: keras.layers.Layer, loss: Any = "mse") -> Any:
    """Returns the first weight after a step of SGD on 8 rows, by Keras alone or by tfmulti."""
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(2, kernel_initializer="ones"), *layers]
        )
        if prepared:
            prepare(model)
        model.compile(keras.optimizers.SGD(0.1), loss)
    fit(model, x=X[:8], y=X[:8, :2], batch_size=8, epochs=1, shuffle=False)
    return model.get_weights()[0].tolist()


def weights_after_a_scalar_loss() -> Any:
    def loss(y_true: Any, y_pred: Any) -> Any:
        return tf.reduce_mean(tf.square(y_true - y_pred))

    return [_weights_after_a_step(prepared, loss=loss) for prepared in (False, True)]


class AddsRows(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * keras.ops.sum(keras.ops.square(x), axis=-1))
        return x


def weights_after_added_losses_of_rows() -> Any:
    return [_weights_after_a_step(prepared, AddsRows()) for prepared in (False, True)]


def weights_after_a_schedule_free_step(by: str) -> Any:
    """Returns the first weight, 1 before, after a step of rate 0, and the number of warnings of it.

    The first pair is that of Keras alone, whose model is made in no scope, as on one device.
    """
    found = []
    for scope in (contextlib.nullcontext(), here.strategy.scope()):
        with scope:
            layer = keras.layers.Dense(2, kernel_initializer="ones")
            model = keras.Sequential([keras.Input((6,)), layer])
            if found:
                prepare(model)
            model.compile(keras.optimizers.ScheduleFreeAdamW(0.0), "mse")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if by == "fit":
                fit(model, x=X[:8], y=X[:8, :2], batch_size=8, epochs=1, shuffle=False)
            model.train_on_batch(X[:8], X[:8, :2])
        told = [w for w in caught if "a momentum that plain Keras" in str(w.message)]
        found.append([float(model.get_weights()[0][0, 0]), len(told)])
    return found


def operations_of_a_function() -> Any:
    """Returns what a `tf.function` is in a graph: outside a step of tfmulti, and in one."""
    installation.install()
    found = []

    @tf.function  # type: ignore[untyped-decorator]
    def doubled_if_positive(x: Any) -> Any:
        # AutoGraph must convert this condition.
        if tf.reduce_sum(x) > 0:
            x = 2.0 * x
        return tf.negative(x)

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        outside = doubled_if_positive(x)
        with computing(_slice(0.5, 4)):
            inside = doubled_if_positive(x)
        found.extend([outside.op.type, inside.op.type])
        return outside, inside

    values = step(tf.ones((4, 1)))
    return [found, *(float(value[0, 0]) for value in values)]


def metric_function_of_a_batch() -> Any:
    """Returns a metric that is one number for a batch: by Keras alone, by tfmulti, by NumPy."""

    def spread(y_true: Any, y_pred: Any) -> Any:
        return tf.math.reduce_std(y_pred)

    found = []
    x = np.sort(X[:8], axis=0)
    for prepared in (False, True):
        with here.strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Identity()])
            if prepared:
                prepare(model)
            model.compile("sgd", "mse", metrics=[spread])
        found.append(model.evaluate(x, x, batch_size=8, verbose=0)[1])
    return [*found, float(x.std())]


def dropout_masks_of_replicas() -> Any:
    """Returns the masks that each replica draws, by Keras alone and by tfmulti."""
    with here.strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=4)
    installation.install()

    def masks() -> Any:
        alone = layer(tf.ones((4, 20)), training=True)
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        replica_slice = _slice(0.5, 4)._replace(first_row=4 * tf.cast(number, tf.int64))
        with computing(replica_slice):
            return tf.stack([alone, layer(tf.ones((4, 20)), training=True)])

    return on_all_replicas(masks)


def moving_means_of_replicas() -> Any:
    """Returns the moving means of the replicas after an epoch of Keras alone."""
    with here.strategy.scope():
        layer = keras.layers.BatchNormalization()
        model = keras.Sequential([keras.Input((6,)), layer])
        model.compile("sgd", "mse")
    fit(model, y=X, epochs=1)
    return on_all_replicas(lambda: tf.convert_to_tensor(layer.moving_mean.value))


def synchronized_variance() -> Any:
    """Returns the variance of 3000, 3001, 3002 and 3003 on two replicas: by Keras, by tfmulti."""
    with here.strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.0, synchronized=True)
        layer.build((None, 1))
    installation.install()

    def variances() -> Any:
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        x = 3000.0 + tf.cast(2 * number + [[0], [1]], tf.float32)
        layer(x, training=True)
        alone = tf.identity(layer.moving_variance.value)
        with computing(_slice(0.5, 2)):
            layer(x, training=True)
        return tf.stack([alone, tf.identity(layer.moving_variance.value)])

    return on_all_replicas(variances)[0]


def fit_by_keras_with_averages_that_overwrite() -> Any:
    return fit(plain_model(use_ema=True, ema_overwrite_frequency=2), epochs=1)


def fit_by_keras_with_gradient_accumulation() -> Any:
    return fit(plain_model(gradient_accumulation_steps=2), epochs=1)


def _called_in_a_condition(method: str, *, patched: bool) -> list[Any]:
    """Returns a variable on each replica, after a method of SGD ran inside a condition."""
    with here.strategy.scope():
        variable = keras.Variable(np.ones(1, np.float32))
        optimizer = keras.optimizers.SGD(0.5, weight_decay=0.5)
        optimizer.build([variable])
    if patched:
        take_reduced_gradients(optimizer, lambda gradients, _: list(gradients), lambda *_: False)

    def replica_step() -> Any:
        gradients = [tf.ones(1)]
        first = [] if method == "_apply_weight_decay" else [gradients]
        rest = [0.5] if method == "_backend_update_step" else []

        def run() -> tf.Tensor:
            getattr(optimizer, method)(*first, [variable], *rest)
            return tf.constant(0)

        tf.cond(tf.constant(True), run, lambda: tf.constant(0))
        return tf.identity(variable.value)

    return on_all_replicas(replica_step)


def update_by_keras_in_a_condition() -> Any:
    return _called_in_a_condition("_backend_update_step", patched=False)


def weight_decay_by_keras_in_a_condition() -> Any:
    return _called_in_a_condition("_apply_weight_decay", patched=False)


def update_and_weight_decay_in_a_condition() -> Any:
    return [
        _called_in_a_condition(method, patched=True)
        for method in ("_backend_update_step", "_apply_weight_decay")
    ]


def _loss_of_two_rows(name: str) -> list[Any]:
    """Returns the result of a TensorFlow function without tfmulti, and in a step of tfmulti."""

    def step() -> Any:
        values = tf.constant([1.0, 3.0])
        functions = {
            "average": lambda: tf.nn.compute_average_loss(values),
            "regularization": lambda: tf.nn.scale_regularization_loss(values),
        }
        alone = functions[name]()
        with computing(_slice(0.5, 2)):
            return tf.stack([alone, functions[name]()])

    installation.install()
    return on_all_replicas(step)[0]


def loss_functions_of_custom_loops() -> Any:
    return [_loss_of_two_rows(n) for n in ("average", "regularization")]


def step_with_clipped_gradients() -> Any:
    return [_clipped_step(patched=False), _clipped_step(patched=True)]


def _clipped_step(*, patched: bool) -> float:
    """Returns a variable of 0 after one step of SGD, with gradients 3 and 0 clipped at 2."""
    with here.strategy.scope():
        variable = keras.Variable(np.zeros(1, np.float32))
        optimizer = keras.optimizers.SGD(1.0, clipvalue=2.0)
        optimizer.build([variable])
    if patched:
        take_reduced_gradients(
            optimizer,
            lambda gradients, _: [
                g / 2 for g in tf.distribute.get_replica_context().all_reduce("SUM", gradients)
            ],
            lambda *_: False,
        )

    def step() -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        optimizer.apply([3.0 * tf.cast([replica == 0], tf.float32)], [variable])

    tf.function(lambda: here.strategy.run(step))()
    return float(keras.ops.convert_to_numpy(variable)[0])


def sums_with_a_number_for_each_row() -> list[Any]:
    """Returns the sum of zeros and of 0, 1, 2 and 3 for the rows, by Keras and by tfmulti."""
    installation.install()
    zeros, column = tf.zeros((4, 4)), tf.range(4.0)[:, None]
    with computing(_slice(0.5, 4)):
        patched = keras.ops.add(zeros, column)
    return [np.asarray(keras.ops.add(zeros, column)), np.asarray(patched)]


def _adding_a_number_for_each_row(entries: int) -> keras.Model:
    """Returns a model that adds a number for each row to so many entries, which is prepared."""
    with here.strategy.scope():
        inputs = keras.Input((6,))
        parts = [keras.layers.Dense(units)(inputs) for units in (entries, 1)]
        outputs = keras.layers.Dense(1)(keras.layers.Add()(parts))
        return prepare(keras.Model(inputs, outputs))


def warnings_of_predictions_with_a_number_for_each_row(case: str) -> Any:
    """Returns how many warnings an evaluation and a prediction of 20 rows in batches of 8 give."""
    model = _adding_a_number_for_each_row(int(case))
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((X[:20], X[:20, :1])).batch(8)
    counts = []
    for run in (model.evaluate, model.predict):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(data, verbose=0)
        counts.append(sum("adds a number to each row" in str(w.message) for w in caught))
    return counts


def training_with_a_number_for_each_row(case: str) -> Any:
    """Returns the losses of batches of 8 rows, in a graph and in eager mode, and the warnings.

    The number is added to so many values as `case` says.
    """
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for run_eagerly in (False, True):
            keras.utils.set_random_seed(1)
            model = _adding_a_number_for_each_row(int(case))
            with here.strategy.scope():
                model.compile("sgd", "mse", run_eagerly=run_eagerly)
            history = model.fit(X[:24], X[:24, :1], batch_size=8, shuffle=False, verbose=0)
            losses.append(history.history["loss"][0])
    return [
        losses,
        [str(w.message) for w in caught if "adds a number to each row" in str(w.message)],
    ]

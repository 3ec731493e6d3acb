"""What Keras alone still gets wrong: the reasons for `keras_patches`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support.behaviours.common import X, behaviour, fit, here, on_all_replicas
from tfmulti import prepare
from tfmulti.distribution.replica_slice import ReplicaSlice, computing
from tfmulti.keras_patches import installation
from tfmulti.keras_patches.optimizers import take_reduced_gradients


def plain_model(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "softmax")])
        made.compile(keras.optimizers.SGD(0.5, **options), "sparse_categorical_crossentropy")
    return made


@behaviour
def upstream_fit() -> Any:
    return fit(plain_model())


@behaviour
def upstream_uneven_first_batch() -> Any:
    return fit(plain_model(), batch_size=25)


def _share(weight: float, rows: int) -> ReplicaSlice:
    count = tf.constant(rows, tf.int64)
    return ReplicaSlice(
        tf.constant(weight), count, tf.constant(0, tf.int64), 2 * count, rows, False, True
    )


@behaviour
def upstream_loss_is_divided_by_replicas() -> Any:
    installation.install()

    def losses() -> Any:
        loss = keras.losses.MeanSquaredError()
        with computing(_share(0.5, 4)):
            mended = loss(tf.ones((4, 1)), tf.zeros((4, 1)))
        return loss(tf.ones((4, 1)), tf.zeros((4, 1))), mended

    pair = tf.function(lambda: here.strategy.run(losses))()
    return [float(here.strategy.experimental_local_results(value)[0]) for value in pair]


def _weights_after_a_step(prepared: bool, *layers: keras.layers.Layer, loss: Any = "mse") -> Any:
    """Returns the first weight after one step of SGD on 8 rows, by Keras or by tfmulti."""
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        made = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(2, kernel_initializer="ones"), *layers]
        )
        if prepared:
            prepare(made)
        made.compile(keras.optimizers.SGD(0.1), loss)
    fit(made, x=X[:8], y=X[:8, :2], batch_size=8, epochs=1, shuffle=False)
    return made.get_weights()[0].tolist()


@behaviour
def upstream_scalar_losses_count_for_each_replica() -> Any:
    def loss(y_true: Any, y_pred: Any) -> Any:
        return tf.reduce_mean(tf.square(y_true - y_pred))

    return [_weights_after_a_step(prepared, loss=loss) for prepared in (False, True)]


class AddsRows(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * keras.ops.sum(keras.ops.square(x), axis=-1))
        return x


@behaviour
def upstream_added_losses_of_rows_are_divided() -> Any:
    return [_weights_after_a_step(prepared, AddsRows()) for prepared in (False, True)]


@behaviour
def upstream_metric_functions_see_a_replica() -> Any:
    """Returns a metric that is one number for a batch, by Keras, by tfmulti and by NumPy."""

    def spread(y_true: Any, y_pred: Any) -> Any:
        return tf.math.reduce_std(y_pred)

    found = []
    x = np.sort(X[:8], axis=0)
    for prepared in (False, True):
        with here.strategy.scope():
            made = keras.Sequential([keras.Input((6,)), keras.layers.Identity()])
            if prepared:
                prepare(made)
            made.compile("sgd", "mse", metrics=[spread])
        found.append(made.evaluate(x, x, batch_size=8, verbose=0)[1])
    return [*found, float(x.std())]


@behaviour
def upstream_masks_are_the_same_on_all_replicas() -> Any:
    """Returns, by Keras and by tfmulti, the masks that two replicas draw."""
    with here.strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=4)
    installation.install()

    def masks() -> Any:
        alone = layer(tf.ones((4, 20)), training=True)
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        share = _share(0.5, 4)._replace(first_row=4 * tf.cast(number, tf.int64))
        with computing(share):
            return tf.stack([alone, layer(tf.ones((4, 20)), training=True)])

    return on_all_replicas(masks)


@behaviour
def upstream_statistics_of_replicas_drift_apart() -> Any:
    """Returns the moving means of the replicas after a step of Keras alone."""
    with here.strategy.scope():
        layer = keras.layers.BatchNormalization()
        made = keras.Sequential([keras.Input((6,)), layer])
        made.compile("sgd", "mse")
    fit(made, y=X, epochs=1)
    return on_all_replicas(lambda: tf.convert_to_tensor(layer.moving_mean.value))


@behaviour
def upstream_synchronized_statistics_lose_digits() -> Any:
    """Returns the variance of values 1 apart from each other, around 3000, 2 a replica."""
    with here.strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.0, synchronized=True)
        layer.build((None, 1))
    installation.install()

    def variances() -> Any:
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        x = 3000.0 + tf.cast(2 * number + [[0], [1]], tf.float32)
        layer(x, training=True)
        alone = tf.identity(layer.moving_variance.value)
        with computing(_share(0.5, 2)):
            layer(x, training=True)
        return tf.stack([alone, tf.identity(layer.moving_variance.value)])

    return on_all_replicas(variances)[0]


@behaviour
def upstream_averages_cannot_overwrite() -> Any:
    return fit(plain_model(use_ema=True, ema_overwrite_frequency=2), epochs=1)


@behaviour
def upstream_gradients_cannot_accumulate() -> Any:
    return fit(plain_model(gradient_accumulation_steps=2), epochs=1)


def _within_a_condition(name: str, *, mended: bool) -> list[Any]:
    """Returns a variable after a method of SGD ran inside a condition, on each replica."""
    with here.strategy.scope():
        variable = keras.Variable(np.ones(1, np.float32))
        optimizer = keras.optimizers.SGD(0.5, weight_decay=0.5)
        optimizer.build([variable])
    if mended:
        take_reduced_gradients(optimizer, list, lambda *_: False)

    def replica_step() -> Any:
        gradients = [tf.ones(1)]
        first = [] if name == "_apply_weight_decay" else [gradients]
        rest = [0.5] if name == "_backend_update_step" else []

        def run() -> tf.Tensor:
            getattr(optimizer, name)(*first, [variable], *rest)
            return tf.constant(0)

        tf.cond(tf.constant(True), run, lambda: tf.constant(0))
        return tf.identity(variable.value)

    return on_all_replicas(replica_step)


@behaviour
def upstream_an_update_needs_merge_call() -> Any:
    return _within_a_condition("_backend_update_step", mended=False)


@behaviour
def upstream_a_decay_needs_merge_call() -> Any:
    return _within_a_condition("_apply_weight_decay", mended=False)


@behaviour
def updates_and_decays_within_a_condition() -> Any:
    return [
        _within_a_condition(name, mended=True)
        for name in ("_backend_update_step", "_apply_weight_decay")
    ]


def _first_step_of_a_loop(name: str) -> list[Any]:
    """Returns what TensorFlow's function makes of two rows of a share, alone and inside it."""

    def step() -> Any:
        values = tf.constant([1.0, 3.0])
        functions = {
            "average": lambda: tf.nn.compute_average_loss(values),
            "average of 8": lambda: tf.nn.compute_average_loss(values, global_batch_size=8),
            "regularization": lambda: tf.nn.scale_regularization_loss(values),
        }
        alone = functions[name]()
        with computing(_share(0.5, 2)):
            return tf.stack([alone, functions[name]()])

    installation.install()
    return on_all_replicas(step)[0]


@behaviour
def upstream_functions_of_loops() -> Any:
    return [_first_step_of_a_loop(n) for n in ("average", "average of 8", "regularization")]


@behaviour
def upstream_clips_before_reducing() -> Any:
    return [_clipped_step(mended=False), _clipped_step(mended=True)]


def _clipped_step(*, mended: bool) -> float:
    """Returns what one step of SGD leaves of 0, with gradients 3 and 0 clipped at 2."""
    with here.strategy.scope():
        variable = keras.Variable(np.zeros(1, np.float32))
        optimizer = keras.optimizers.SGD(1.0, clipvalue=2.0)
        optimizer.build([variable])
    if mended:
        take_reduced_gradients(
            optimizer,
            lambda gradients: [
                g / 2 for g in tf.distribute.get_replica_context().all_reduce("SUM", gradients)
            ],
            lambda *_: False,
        )

    def step() -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        optimizer.apply([3.0 * tf.cast([replica == 0], tf.float32)], [variable])

    tf.function(lambda: here.strategy.run(step))()
    return float(keras.ops.convert_to_numpy(variable)[0])

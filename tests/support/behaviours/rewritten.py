"""The cases of Keras' own tests of distribution, against prepared models.

Keras tests optimizers and variables under a MirroredStrategy by themselves
(`keras/src/backend/tensorflow/distribute_test.py`, `optimizer_distribute_test.py`). Here each
case is a training step of a prepared model, under any strategy, with rows that do not divide
evenly, and the expected numbers are worked out by hand in `test_rewritten.py`.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support.behaviours.common import X, Y, behaviour, fit, here, on_all_replicas
from tfmulti import prepare


class Pulls(keras.Model):
    """Weights whose gradient is the mean of the rows it is given."""

    def __init__(self, *starts: list[float]) -> None:
        super().__init__()
        self.parts = [
            self.add_weight(
                shape=(len(start),),
                name=f"part_{i}",
                initializer=lambda shape, dtype=None, start=start: tf.constant(start, dtype),
            )
            for i, start in enumerate(starts)
        ]
        self.built = True

    def call(self, x: Any) -> Any:
        return keras.ops.sum(x * keras.ops.concatenate(self.parts), axis=-1, keepdims=True)


def trained(rows: list[list[float]], start: Any, optimizer: Any, times: int = 1) -> list[Any]:
    """Returns the weights after each of some steps, on all local replicas."""
    with here.strategy.scope():
        made = prepare(Pulls(*start))
        made.compile(optimizer(), lambda y_true, y_pred: y_pred[:, 0])
    x = np.asarray(rows, np.float32)
    left = []
    for _ in range(times):
        made.train_on_batch(x, np.zeros((len(x), 1), np.float32))
        left.append([_on_replicas(part) for part in made.parts])
    return [left, made]


def _on_replicas(variable: Any) -> list[list[float]]:
    values = here.strategy.experimental_local_results(getattr(variable, "value", variable))
    return [keras.ops.convert_to_numpy(value).tolist() for value in values]


ROWS = [[0.0, 5.0, 9.0, 2.0], [1.0, 5.0, 6.0, 2.0], [2.0, 8.0, 6.0, 2.0]]  # mean 1, 6, 7, 2


@behaviour
def keras_single_step() -> Any:
    return trained(ROWS, [[1.0, 2.0, 3.0, 4.0]], lambda: keras.optimizers.SGD(0.5, momentum=0.06))[
        0
    ]


@behaviour
def keras_config() -> Any:
    def make() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.5, momentum=0.06, nesterov=True, weight_decay=0.004)

    made = trained(ROWS, [[1.0, 2.0, 3.0, 4.0]], make)[1]
    again = keras.optimizers.deserialize(keras.optimizers.serialize(made.optimizer))
    config, expected = ({**o.get_config(), "name": ""} for o in (again, make()))
    return [type(again) is keras.optimizers.SGD, config == expected]


@behaviour
def keras_weight_decay() -> Any:
    def make(**excluded: Any) -> Any:
        optimizer = keras.optimizers.SGD(1.0, weight_decay=0.004)
        if excluded:
            optimizer.exclude_from_weight_decay(**excluded)
        return optimizer

    rows, start = [[0.0, 0.0]] * 3, [[2.0], [3.0]]
    return [
        trained(rows, start, make)[0],
        trained(rows, start, lambda: make(var_names=["part_1"]))[0],
    ]


@behaviour
def keras_nesterov() -> Any:
    """Returns weights after steps of different gradients, and the one-device optimizer's."""
    start = [np.ones(10).tolist()]
    gradients = [np.arange(0.1, 1.1, 0.1), *[np.full(10, 0.01)] * 4]
    with here.strategy.scope():
        made = prepare(Pulls(*start))
        made.compile(keras.optimizers.SGD(nesterov=True), lambda y_true, y_pred: y_pred[:, 0])
    left = []
    for gradient in gradients:
        rows = np.stack([gradient * factor for factor in (0.0, 1.0, 2.0)]).astype(np.float32)
        made.train_on_batch(rows, np.zeros((3, 1), np.float32))
        left.append(_on_replicas(made.parts[0]))
    return left


def _clipped(**options: Any) -> Any:
    rows = [[0.0, 300.0], [300.0, 0.0], [0.0, 0.0]]  # mean 100, 100
    return trained(rows, [[0.0, 0.0]], lambda: keras.optimizers.SGD(1.0, **options))[0]


@behaviour
def keras_clip_norm() -> Any:
    return _clipped(clipnorm=1.0)


@behaviour
def keras_clip_value() -> Any:
    return _clipped(clipvalue=1.0)


@behaviour
def keras_stateless_apply() -> Any:
    made = trained(ROWS, [[1.0, 2.0, 3.0, 4.0]], lambda: keras.optimizers.SGD(0.5))[1]
    optimizer = made.optimizer
    return optimizer.stateless_apply(optimizer.variables, [np.ones(4)], made.parts)


@behaviour
def keras_moving_average() -> Any:
    def make() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3)

    rows = [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]  # mean 1, 1
    return trained(rows, [[3.0, 4.0]], make, times=3)[0]


@behaviour
def keras_gradient_accumulation() -> Any:
    def make() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(1.0, gradient_accumulation_steps=3)

    rows = [[0.0, 2.0], [1.0, 2.0], [2.0, 2.0]]  # mean 1, 2
    left, made = trained(rows, [[1.0, 2.0]], make, times=3)
    return [left, int(keras.ops.convert_to_numpy(made.optimizer.iterations))]


@behaviour
def keras_variables_are_mirrored() -> Any:
    made = trained(ROWS, [[1.0, 2.0, 3.0, 4.0]], lambda: keras.optimizers.SGD(0.5, momentum=0.9))[1]
    variables = [*made.parts, *made.optimizer.variables[2:]]
    return [
        [type(v).__name__, isinstance(v.value, tf.distribute.DistributedValues), v.aggregation]
        for v in variables
    ]


@behaviour
def keras_aggregation_and_synchronization() -> Any:
    """Returns how the variables of a prepared model's layers and metrics meet."""
    with here.strategy.scope():
        made = prepare(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
        made.compile("sgd", "mse", metrics=["mae"])
    fit(made, x=X[:, :2], y=Y, epochs=1)
    kernel, total = made.layers[0].kernel, made.metrics[-1].variables[0]
    return [[str(v.value.aggregation), str(v.value.synchronization)] for v in (kernel, total)] + [
        [kernel.aggregation, total.aggregation]
    ]


@behaviour
def keras_run_of_a_model() -> Any:
    """Returns what `strategy.run` of a prepared model gives: 0 rows on all but the second."""
    with here.strategy.scope():
        made = prepare(
            keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, kernel_initializer="ones")])
        )

    def run() -> Any:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return made(tf.fill([8, 4], tf.cast(replica == 1, tf.float32)))

    return on_all_replicas(run)


@behaviour
def keras_epochs_of_batches() -> Any:
    """Returns the steps of an epoch of 100 rows in batches of 16, and the last one's rows."""
    steps, rows = [], []

    class Record(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            steps.append(batch)
            rows.append(float(logs["rows"]))

    class CountsRows(keras.metrics.Sum):
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            super().update_state(keras.ops.ones_like(y_true[:, :1]))

    with here.strategy.scope():
        made = prepare(keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)]))
        made.compile("sgd", "mse", metrics=[CountsRows(name="rows")])
    x, y = np.ones((100, 6), np.float32), np.ones((100, 4), np.float32)
    weights = np.ones(100, np.float32)
    fit(made, x=x, y=y, sample_weight=weights, batch_size=16, epochs=1, callbacks=[Record()])
    return [steps, rows]


@behaviour
def keras_seed_generator() -> Any:
    """Returns where a prepared model's dropout stands on each replica after 4 steps."""
    with here.strategy.scope():
        dropout = keras.layers.Dropout(0.5, seed=42)
        made = prepare(keras.Sequential([keras.Input((6,)), dropout, keras.layers.Dense(3)]))
        made.compile("sgd", "mse")
    fit(made, y=X[:, :3], epochs=1)
    return on_all_replicas(lambda: dropout.seed_generator.state.value)


@behaviour
def keras_regularized_fit() -> Any:
    """Returns loss and weight of one step with L1 and L2, on 13 rows of 1."""
    with here.strategy.scope():
        layer = keras.layers.Dense(
            1,
            use_bias=False,
            kernel_initializer=keras.initializers.Constant(1),
            kernel_regularizer=keras.regularizers.L1L2(l1=0.01, l2=0.01),
        )
        made = prepare(keras.Sequential([keras.Input((1,)), layer]))
        made.compile("sgd", "mse")
    history = fit(made, x=np.ones((13, 1)), y=np.zeros((13, 1)), batch_size=13, epochs=1)
    return [history["loss"], _on_replicas(layer.kernel)]

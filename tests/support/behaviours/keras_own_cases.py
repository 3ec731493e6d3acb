"""Runs the cases of Keras' own tests of distribution with prepared models.

Keras tests optimizers and variables under a MirroredStrategy by themselves
(`keras/src/backend/tensorflow/distribute_test.py`, `optimizer_distribute_test.py`). Here each
case is a training step of a prepared model under any strategy. The rows cannot be divided evenly.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support.behaviours.common import X, Y, fit, here, on_all_replicas
from tfmulti import prepare


class Linear(keras.Model):
    """Has weights whose gradient is the mean of the input rows."""

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
    """Returns the weights on all local replicas after each step, and the model."""
    with here.strategy.scope():
        model = prepare(Linear(*start))
        model.compile(optimizer(), lambda y_true, y_pred: y_pred[:, 0])
    x = np.asarray(rows, np.float32)
    left = []
    for _ in range(times):
        model.train_on_batch(x, np.zeros((len(x), 1), np.float32))
        left.append([_on_replicas(part) for part in model.parts])
    return [left, model]


def _on_replicas(variable: Any) -> list[list[float]]:
    values = here.strategy.experimental_local_results(getattr(variable, "value", variable))
    return [keras.ops.convert_to_numpy(value).tolist() for value in values]


# Their mean is (1, 6, 7, 2).
ROWS = [[0.0, 5.0, 9.0, 2.0], [1.0, 5.0, 6.0, 2.0], [2.0, 8.0, 6.0, 2.0]]
START = [[1.0, 2.0, 3.0, 4.0]]


def single_step() -> Any:
    return trained(ROWS, START, lambda: keras.optimizers.SGD(0.5, momentum=0.06))[0]


def config() -> Any:
    def make() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.5, momentum=0.06, nesterov=True, weight_decay=0.004)

    model = trained(ROWS, START, make)[1]
    again = keras.optimizers.deserialize(keras.optimizers.serialize(model.optimizer))
    config, expected = ({**o.get_config(), "name": ""} for o in (again, make()))
    return [type(again) is keras.optimizers.SGD, config == expected]


def weight_decay() -> Any:
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


def nesterov() -> Any:
    """Returns the weights after each of five steps."""
    start = [np.ones(10).tolist()]
    gradients = [np.arange(0.1, 1.1, 0.1), *[np.full(10, 0.01)] * 4]
    with here.strategy.scope():
        model = prepare(Linear(*start))
        model.compile(keras.optimizers.SGD(nesterov=True), lambda y_true, y_pred: y_pred[:, 0])
    left = []
    for gradient in gradients:
        rows = np.stack([gradient * factor for factor in (0.0, 1.0, 2.0)]).astype(np.float32)
        model.train_on_batch(rows, np.zeros((3, 1), np.float32))
        left.append(_on_replicas(model.parts[0]))
    return left


def _clipped(**options: Any) -> Any:
    rows = [[0.0, 300.0], [300.0, 0.0], [0.0, 0.0]]
    return trained(rows, [[0.0, 0.0]], lambda: keras.optimizers.SGD(1.0, **options))[0]


def clip_norm() -> Any:
    return _clipped(clipnorm=1.0)


def clip_value() -> Any:
    return _clipped(clipvalue=1.0)


def stateless_apply() -> Any:
    model = trained(ROWS, START, lambda: keras.optimizers.SGD(0.5))[1]
    optimizer = model.optimizer
    return optimizer.stateless_apply(optimizer.variables, [np.ones(4)], model.parts)


def moving_average() -> Any:
    def make() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3)

    rows = [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]
    return trained(rows, [[3.0, 4.0]], make, times=3)[0]


def gradient_accumulation() -> Any:
    def make() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(1.0, gradient_accumulation_steps=3)

    rows = [[0.0, 2.0], [1.0, 2.0], [2.0, 2.0]]
    left, model = trained(rows, [[1.0, 2.0]], make, times=3)
    return [left, int(keras.ops.convert_to_numpy(model.optimizer.iterations))]


def variables_are_mirrored() -> Any:
    model = trained(ROWS, START, lambda: keras.optimizers.SGD(0.5, momentum=0.9))[1]
    variables = [*model.parts, *model.optimizer.variables[2:]]
    return [
        [type(v).__name__, isinstance(v.value, tf.distribute.DistributedValues), v.aggregation]
        for v in variables
    ]


def aggregation_and_synchronization() -> Any:
    """Returns how the variables of a layer and of a metric are combined over the replicas."""
    with here.strategy.scope():
        model = prepare(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
        model.compile("sgd", "mse", metrics=["mae"])
    fit(model, x=X[:, :2], y=Y, epochs=1)
    kernel, total = model.layers[0].kernel, model.metrics[-1].variables[0]
    return [[str(v.value.aggregation), str(v.value.synchronization)] for v in (kernel, total)] + [
        [kernel.aggregation, total.aggregation]
    ]


def run_of_a_model() -> Any:
    """Returns the outputs of `strategy.run`, with inputs of 1 on the second replica, else of 0."""
    with here.strategy.scope():
        model = prepare(
            keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, kernel_initializer="ones")])
        )

    def run() -> Any:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return model(tf.fill([8, 4], tf.cast(replica == 1, tf.float32)))

    return on_all_replicas(run)


def epochs_of_batches() -> Any:
    """Returns the steps of an epoch of 100 rows in batches of 16, and the rows after each."""
    steps, rows = [], []

    class Record(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            steps.append(batch)
            rows.append(float(logs["rows"]))

    class CountsRows(keras.metrics.Sum):
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            super().update_state(keras.ops.ones_like(y_true[:, :1]))

    with here.strategy.scope():
        model = prepare(keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)]))
        model.compile("sgd", "mse", metrics=[CountsRows(name="rows")])
    x, y = np.ones((100, 6), np.float32), np.ones((100, 4), np.float32)
    weights = np.ones(100, np.float32)
    fit(model, x=x, y=y, sample_weight=weights, batch_size=16, epochs=1, callbacks=[Record()])
    return [steps, rows]


def seed_generator() -> Any:
    """Returns the state of the dropout's seed generator on each replica after 4 steps."""
    with here.strategy.scope():
        dropout = keras.layers.Dropout(0.5, seed=42)
        model = prepare(keras.Sequential([keras.Input((6,)), dropout, keras.layers.Dense(3)]))
        model.compile("sgd", "mse")
    fit(model, y=X[:, :3], epochs=1)
    return on_all_replicas(lambda: dropout.seed_generator.state.value)


def regularized_fit() -> Any:
    """Returns the loss and the weight after one step with L1 and L2, on 13 rows of 1."""
    with here.strategy.scope():
        layer = keras.layers.Dense(
            1,
            use_bias=False,
            kernel_initializer=keras.initializers.Constant(1),
            kernel_regularizer=keras.regularizers.L1L2(l1=0.01, l2=0.01),
        )
        model = prepare(keras.Sequential([keras.Input((1,)), layer]))
        model.compile("sgd", "mse")
    history = fit(model, x=np.ones((13, 1)), y=np.zeros((13, 1)), batch_size=13, epochs=1)
    return [history["loss"], _on_replicas(layer.kernel)]

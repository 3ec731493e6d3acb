"""Returns numbers that replicas could change: statistics, random numbers, losses, and logs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support.behaviours.common import X, Y, classifier, fit, here, weights_of
from tests.support.behaviours.graphs import is_collective, nodes_of
from tests.support.cases import contrastive_loss
from tests.support.models import of_two_outputs
from tfmulti import prepare
from tfmulti.distribution import collectives, replica_context

# Of two batches of 24, the last has one row.
ONE_LEFT = {"x": X[:25], "y": Y[:25]}


def _normalized(**options: Any) -> keras.Model:
    """Returns a model whose first layer normalizes the data, on each replica by itself."""
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        model = prepare(
            keras.Sequential(
                [
                    keras.Input((6,)),
                    keras.layers.BatchNormalization(momentum=0.5),
                    keras.layers.Dense(3, "softmax"),
                ]
            ),
            sync_batch_norm=False,
        )
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", **options)
    return model


def _worker_folder() -> Path:
    return Path(tempfile.mkdtemp(dir=here.shared))


def _statistics(model: keras.Model) -> list[list[list[float]]]:
    """Returns the moving means, then the moving variances, of the local replicas."""
    layer = model.layers[0]
    return [
        [value.numpy().tolist() for value in here.strategy.experimental_local_results(v.value)]
        for v in (layer.moving_mean, layer.moving_variance)
    ]


def moving_statistics_of_an_epoch() -> Any:
    """Returns the statistics after an epoch, and the saved ones of its second step."""
    model = _normalized()
    path = _worker_folder() / "model.keras"

    class Save(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                self.model.save(path)

    fit(model, x=X[:61], y=Y[:61], shuffle=False, epochs=1, callbacks=[Save()])
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        saved = keras.models.load_model(path, compile=False).layers[0]
    saved_statistics = [
        keras.ops.convert_to_numpy(v).tolist() for v in (saved.moving_mean, saved.moving_variance)
    ]
    return [_statistics(model), saved_statistics]


def moving_statistics_of_several_steps_per_execution() -> Any:
    model = _normalized(steps_per_execution=3)
    fit(model, **ONE_LEFT, shuffle=False, epochs=1)
    return _statistics(model)


def moving_statistics_with_an_empty_replica() -> Any:
    """Returns losses of validation, of evaluation, and of the saved model; then the statistics."""
    model = _normalized()
    history = fit(model, **ONE_LEFT, shuffle=False, epochs=1, validation_data=(X, Y))
    evaluated = model.evaluate(X, Y, verbose=0)
    path = _worker_folder() / "model.keras"
    model.save(path)
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        alone = keras.models.load_model(path).evaluate(X, Y, verbose=0)
    return [history["val_loss"][0], evaluated, alone, _statistics(model)]


def moving_statistics_of_a_frozen_layer() -> Any:
    """Returns the moving means, which an average over the replicas would round."""
    model = _normalized()
    model.layers[0].trainable = False
    model.layers[0].moving_mean.assign(np.linspace(0.1, 0.7, 6))
    fit(model, epochs=1)
    return _statistics(model)[0]


def _drawn(layer: keras.layers.Layer, x: np.ndarray) -> list[np.ndarray]:
    """Returns the outputs of a random layer in two calls."""

    class Always(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def call(self, x: Any) -> Any:
            return self.layer(x, training=True)

    with here.strategy.scope():
        model = prepare(Always())
    return [model.predict(x, batch_size=len(x), verbose=0) for _ in range(2)]


def dropout_masks() -> Any:
    with here.strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=4)
    return [found.tolist() for found in _drawn(layer, np.ones((13, 40), np.float32))]


def dropout_mask_shared_by_all_rows() -> Any:
    with here.strategy.scope():
        layer = keras.layers.Dropout(0.5, noise_shape=(1, 40), seed=4)
    return _drawn(layer, np.ones((13, 40), np.float32))[0].tolist()


def augmented_images() -> Any:
    with here.strategy.scope():
        layer = keras.layers.RandomTranslation(0.3, 0.3, seed=4)
    images = np.arange(7 * 25, dtype=np.float32).reshape(7, 5, 5, 1)
    return [found.tolist() for found in _drawn(layer, images)]


class Chooses(keras.layers.Layer):
    """Draws categories, which Keras cannot draw row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(9)

    def call(self, x: Any, training: bool = False) -> Any:
        chosen = keras.random.categorical(keras.ops.zeros_like(x), 30, seed=self.seed)
        return keras.ops.cast(chosen, "float32")


def categorical_draws() -> Any:
    with here.strategy.scope():
        layer = Chooses()
    return _drawn(layer, np.zeros((8, 10), np.float32))[0].tolist()


def initial_weights_of_differently_seeded_workers() -> Any:
    """Returns the kernel of each local replica."""
    keras.utils.set_random_seed(100 + here.placement.rank)
    with here.strategy.scope():
        model = prepare(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]))
    return [
        value.numpy().tolist()
        for value in here.strategy.experimental_local_results(model.weights[0].value)
    ]


def overflow_on_one_replica() -> Any:
    """Returns the steps taken, the loss scale, whether all is finite, and the weights.

    A row of the last replica in the second batch overflows float16, whose largest number is 65504.
    """
    x = X.copy()
    x[47] = 6e4
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with here.strategy.scope():
            optimizer = keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.01), initial_scale=64.0
            )
        model = classifier(keras.layers.Dense(8, dtype="float32"), optimizer=optimizer)
    finally:
        keras.config.set_dtype_policy("float32")
    model.layers[0].kernel.assign(np.full((6, 8), 0.5, np.float32))
    fit(model, x=x, epochs=1, shuffle=False)
    weights = weights_of(model)
    finite = all(np.isfinite(np.asarray(weight)).all() for weight in weights)
    steps = int(keras.ops.convert_to_numpy(optimizer.iterations))
    return [steps, float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)), finite, weights]


def logs_of_every_step() -> Any:
    """Returns the loss and the accuracy that callbacks get after every step."""
    seen: list[list[float]] = []

    class Record(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append([float(logs["loss"]), float(logs["accuracy"])])

    fit(classifier(), x=X[:61], y=Y[:61], epochs=2, callbacks=[Record()])
    return seen


def losses_of_two_outputs() -> Any:
    """Returns the losses of `evaluate`, and the means over the batches that Keras defines.

    Then it returns the losses of `fit`, and those of plain Keras on one device.
    """
    x = np.concatenate([X, X[:, :2]], 1)[:61]
    y = {"kind": Y[:61], "size": x[:, :1] ** 2}

    def compiled(strategy: tf.distribute.Strategy, prepared: bool) -> keras.Model:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = prepare(of_two_outputs()) if prepared else of_two_outputs()
            model.compile("sgd", {"kind": "sparse_categorical_crossentropy", "size": "mse"})
        return model

    model = compiled(here.strategy, True)
    found = model.evaluate(x, y, batch_size=24, verbose=0, return_dict=True)
    predicted = model.predict(x, verbose=0)
    kind = -np.log(predicted["kind"][np.arange(61), y["kind"]])
    size = np.square(predicted["size"] - y["size"]).mean(-1)
    batches = [slice(at, at + 24) for at in range(0, 61, 24)]
    expected = [
        float(np.mean([values[rows].mean() for rows in batches])) for values in (kind, size)
    ]
    options = {"x": x, "y": y, "shuffle": False}
    plain = compiled(tf.distribute.OneDeviceStrategy("CPU:0"), False)
    histories = [fit(model, **options), fit(plain, **options)]
    return [found["kind_loss"], found["size_loss"], *expected, *histories]


class NotUnderstood(keras.layers.Layer):
    """Passes its input through a Python function, so that nothing is known about the rows."""

    def call(self, x: Any) -> Any:
        same = tf.ensure_shape(
            tf.numpy_function(lambda a: a, [tf.stop_gradient(x)], x.dtype), x.shape
        )
        return x + (same - tf.stop_gradient(x))


def squared_loss(y_true: Any, y_pred: Any) -> Any:
    """A value for each row, from this row alone."""
    return tf.reduce_sum(tf.square(tf.one_hot(tf.cast(y_true, tf.int32), 3) - y_pred), -1)


class RootOfMean(keras.losses.Loss):
    """Computes one number from the reduced loss of another loss object."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return squared_loss(y_true, y_pred)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return tf.sqrt(super().__call__(y_true, y_pred, sample_weight))


def losses_of_predictions_that_are_not_understood() -> Any:
    """Returns histories with losses that need all rows, and with one that does not."""
    data = {"x": X[:61], "y": Y[:61], "shuffle": False}
    return [
        fit(classifier(NotUnderstood(), prepared={"verify": False}, loss=loss), **data)
        for loss in (contrastive_loss, RootOfMean(), squared_loss)
    ]


class SumsLosses(keras.Model):
    """Has a custom step that sums the losses of the rows, or one that updates twice."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.out = keras.layers.Dense(3, "softmax")
        self.twice = twice
        reduction = "sum_over_batch_size" if twice else "sum"
        self.loss_object = keras.losses.SparseCategoricalCrossentropy(reduction=reduction)

    def call(self, x: Any) -> Any:
        return self.out(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_object(y, self(x, training=True))
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        for _ in range(1 + self.twice):
            self.optimizer.apply(gradients, weights)
        return {"mean_loss": loss}


def _with_custom_step(*, twice: bool, **prepared: Any) -> keras.Model:
    with here.strategy.scope():
        model = prepare(SumsLosses(twice), **prepared)
        model.compile(keras.optimizers.SGD(0.1))
    return model


def custom_step_with_a_summed_loss() -> Any:
    return fit(_with_custom_step(twice=False))


def microbatches_with_two_updates() -> Any:
    return fit(_with_custom_step(twice=True, microbatches=2))


def microbatches_with_a_scalar_loss() -> Any:
    def loss(y_true: Any, y_pred: Any) -> Any:
        return tf.reduce_mean(tf.square(y_true - y_pred[:, :1]))

    return fit(classifier(loss=loss, metrics=None, prepared={"microbatches": 2}))


def microbatches_with_spectral_normalization() -> Any:
    layer = keras.layers.SpectralNormalization(keras.layers.Dense(4))
    return fit(classifier(layer, prepared={"microbatches": 2}))


def microbatches_in_float8() -> Any:
    model = classifier(prepared={"microbatches": 2})
    model.quantize("float8")
    model.compile("sgd", "sparse_categorical_crossentropy")
    return fit(model)


class SumsInItsLoss(keras.Model):
    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.losses.MeanSquaredError(reduction="sum")(y[:, None], self(x)[:, :1]) / 24.0
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"mean_loss": loss}


def eager_step_with_a_loss_that_sums() -> Any:
    with here.strategy.scope():
        inputs = keras.Input((6,))
        model = prepare(SumsInItsLoss(inputs, keras.layers.Dense(3)(inputs)), verify=False)
        model.compile("sgd", run_eagerly=True)
    return fit(model)


class ClipsInItsStep(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.layer(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data[0])))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"mean_loss": loss}


def microbatches_with_custom_clipping() -> Any:
    with here.strategy.scope():
        model = prepare(ClipsInItsStep(), microbatches=2)
        model.compile("sgd")
    return fit(model)


def zero_microbatches() -> Any:
    return classifier(prepared={"microbatches": 0})


def steps_counted_with_microbatches() -> Any:
    """Returns the numbers of steps that the optimizer and the callbacks count."""
    steps: list[int] = []

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            steps.append(batch)

    model = classifier(prepared={"microbatches": 5})
    fit(model, callbacks=[Count()])
    return [int(keras.ops.convert_to_numpy(model.optimizer.iterations)), len(steps)]


def prepared_three_times() -> Any:
    """Returns the losses of a step with synchronized statistics, without, and with them again."""
    with here.strategy.scope():
        norm = keras.layers.BatchNormalization()
    model = classifier(norm)
    start = model.get_weights()
    found = []
    for synchronized in (True, False, True):
        prepare(model, sync_batch_norm=synchronized)
        model.set_weights(start)
        found.append(model.train_on_batch(X[:24], Y[:24])[0])
    return found


class TwoAdams(keras.Model):
    """Has a custom step that updates each layer by another optimizer with slots."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)
        self.optimizers = {"first": keras.optimizers.Adam(0.1), "second": keras.optimizers.Adam()}

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        for layer, name in ((self.first, "first"), (self.second, "second")):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(
                    keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
                )
            weights = layer.trainable_variables
            self.optimizers[name].apply(tape.gradient(loss, weights), weights)
        return {"mean_loss": loss}


def custom_step_with_two_adams() -> Any:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        model = prepare(TwoAdams())
        model.compile()
    history = fit(model, x=X[:61], y=Y[:61], shuffle=False)
    return [history, weights_of(model)]


def optimizer_for_each_layer() -> Any:
    """Adam for the first layer, SGD for the rest."""
    with here.strategy.scope():
        adam, sgd = keras.optimizers.Adam(0.1), keras.optimizers.SGD(0.1)
        optimizer = keras.optimizers.MultiOptimizer(
            lambda variable: adam if tuple(variable.shape) == (6, 8) else sgd
        )
    model = classifier(optimizer=optimizer)
    history = fit(model, x=X[:61], y=Y[:61], shuffle=False)
    return [history, weights_of(model)]


def dataset_of_unknown_length() -> Any:
    """Returns the optimizer's steps and the history with a known length, then without it."""
    found = []
    for known in (True, False):
        with here.strategy.scope():
            mask, adam = keras.layers.Dropout(0.5, seed=1), keras.optimizers.Adam(0.1)
        model = classifier(mask, optimizer=adam)
        data = tf.data.Dataset.from_tensor_slices((X[:61], Y[:61])).batch(24)
        data = data if known else data.filter(lambda *_: True)
        history = fit(model, x=data, y=None, batch_size=None, validation_data=data)
        found.append([int(keras.ops.convert_to_numpy(adam.iterations)), history])
    return found


class UnseededNoise(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x + 0.01 * keras.random.normal(keras.ops.shape(x))


def noise_without_a_seed() -> Any:
    with here.strategy.scope():
        layer = UnseededNoise()
    return fit(classifier(layer), epochs=1)


class StepInAFunction(keras.Model):
    """Has a `train_step` that is a `tf.function` already."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.layer(x)

    @tf.function  # type: ignore[untyped-decorator]
    def train_step(self, data: Any) -> dict[str, Any]:
        loss, gradients = self.computed(data)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"mean_loss": loss}

    def computed(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
            loss = tf.reduce_mean(losses)
        return loss, tape.gradient(loss, self.trainable_variables)


class UpdatesSometimes(StepInAFunction):
    """Has a `train_step` that updates inside a condition."""

    @tf.function  # type: ignore[untyped-decorator]
    def train_step(self, data: Any) -> dict[str, Any]:
        loss, gradients = self.computed(data)
        if loss > 0.1:
            self.optimizer.apply(gradients, self.trainable_variables)
        return {"mean_loss": loss}


def _fit_custom(make: Callable[[], keras.Model]) -> Any:
    keras.utils.set_random_seed(1)
    model = prepare(make())
    model.compile("sgd")
    history = fit(model, x=X[:61], y=Y[:61], shuffle=False)
    return [history, weights_of(model)]


def custom_step_in_a_tf_function() -> Any:
    with here.strategy.scope():
        return _fit_custom(StepInAFunction)


def update_in_a_condition() -> Any:
    with here.strategy.scope():
        return _fit_custom(UpdatesSometimes)


class HalvesItsSum(keras.metrics.Metric):
    """Has a `result` that changes the state."""

    def __init__(self) -> None:
        super().__init__(name="halved")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(keras.ops.sum(y_pred))

    def result(self) -> Any:
        self.total.assign(self.total / 2)
        return self.total.value


class AnyAbove(keras.metrics.Metric):
    """Has a state that is true or false."""

    def __init__(self) -> None:
        super().__init__(name="above")
        self.seen = self.add_weight(shape=(), dtype="bool", name="seen", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.seen.assign(keras.ops.logical_or(self.seen, keras.ops.any(y_pred > 0.1)))

    def result(self) -> Any:
        return keras.ops.cast(self.seen, "float32")


def _evaluate_with(make: Callable[[], keras.metrics.Metric]) -> Any:
    with here.strategy.scope():
        model = classifier(keras.layers.Dense(3))
        model.compile(loss="sparse_categorical_crossentropy", metrics=[make()])
    return prepare(model).evaluate(X[:61], Y[:61], verbose=0)


def result_that_changes_the_state() -> Any:
    return _evaluate_with(HalvesItsSum)


def metric_of_a_bool() -> Any:
    return _evaluate_with(AnyAbove)


def aug_mix_in_the_model() -> Any:
    layers = [
        keras.layers.Reshape((2, 1, 3)),
        keras.layers.AugMix(seed=1),
        keras.layers.Flatten(),
    ]
    return fit(classifier(keras.layers.Dense(6), *layers))


def stateful_lstm() -> Any:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        layers = [
            keras.Input(batch_shape=(12, 6)),
            keras.layers.Reshape((6, 1)),
            keras.layers.LSTM(4, stateful=True),
            keras.layers.Dense(3, "softmax"),
        ]
        model = prepare(keras.Sequential(layers))
        model.compile("sgd", "sparse_categorical_crossentropy")
    return fit(model, x=X[:24], y=Y[:24], batch_size=12)


def fewer_targets_than_inputs() -> Any:
    data = tf.data.Dataset.from_tensors((X[:24], Y[:12])).repeat(2)
    return fit(classifier(), x=data, y=None, batch_size=None)


def fewer_targets_in_the_second_batch() -> Any:
    forms = (tf.TensorSpec((None, 6)), tf.TensorSpec((None,), tf.int64))
    data = tf.data.Dataset.from_generator(
        lambda: iter([(X[:24], Y[:24]), (X[:24], Y[:12])]), output_signature=forms
    )
    return fit(classifier(), x=data, y=None, batch_size=None)


def batches_with_a_scalar() -> Any:
    data = tf.data.Dataset.from_tensors((X[:24], Y[:24], 1.0))
    return fit(classifier(), x=data, y=None, batch_size=None)


def callbacks_that_monitor_the_loss() -> Any:
    """Returns learning rates, losses and best losses of the epochs, and the first weight."""
    c = keras.callbacks
    path = _worker_folder() / "best.keras"
    saved: list[float] = []

    class Best(c.ModelCheckpoint):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            super().on_epoch_end(epoch, logs)
            saved.append(float(self.best))

    with here.strategy.scope():
        optimizer = keras.optimizers.SGD(2.0)
    model = classifier(optimizer=optimizer)
    history = fit(
        model,
        epochs=12,
        validation_split=0.25,
        callbacks=[
            Best(path, save_best_only=True),
            c.ReduceLROnPlateau(patience=0, factor=0.5, monitor="val_loss"),
            c.EarlyStopping(patience=4, restore_best_weights=True),
        ],
    )
    return [history["learning_rate"], history["val_loss"], saved, model.get_weights()[0].tolist()]


def training_with_compressed_gradients() -> Any:
    """Returns the weights after training with each compression, in executions of two steps."""
    found = {}
    for name in ("none", "float16", "bfloat16"):
        model = classifier(prepared={"gradient_compression": name}, steps_per_execution=2)
        fit(model)
        found[name] = weights_of(model)
    return found


def types_of_compressed_gradients() -> Any:
    """Returns the types that two dense gradients and the rows of an embedding are sent as."""
    found = {}
    for name in ("none", "float16", "bfloat16"):
        model = classifier(prepared={"gradient_compression": name})
        rows = tf.IndexedSlices(tf.ones([2, 4]), tf.constant([0, 3]), tf.constant([9, 4]))
        gradients = [tf.ones([1000, 600]), tf.ones([1000, 400]), rows]

        def reduce(model: Any = model, gradients: Any = gradients) -> Any:
            with collectives.serving("test", here.placement):
                return replica_context.reduce_gradients(gradients, **model._reduction)

        step = tf.function(lambda reduce=reduce: here.strategy.run(reduce))
        graph = step.get_concrete_function().graph.as_graph_def()
        types = [n.attr["Tin"].list.type[0] for n in nodes_of(graph) if is_collective(n)]
        found[name] = [tf.as_dtype(type).name for type in types]
    return found


def sums_of_compressed_gradients() -> Any:
    """Returns the sums of three gradients over the workers, with each compression.

    The first is 2048 on the chief and 1 on the others: sums in float16 would lose the ones. The
    second has many digits. Both are in one bucket, whose size the workers do not divide.
    """
    first = here.placement.is_chief
    digits = np.random.default_rng(here.placement.rank).standard_normal([40, 50]).astype(np.float32)
    found = {}
    for name in ("none", "float16", "bfloat16"):
        model = classifier(prepared={"gradient_compression": name})
        gradients = [
            tf.fill([2, 2], 2048.0 if first else 1.0),
            None,
            tf.constant(digits),
            tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2])),
        ]

        def reduce(model: Any = model, gradients: Any = gradients) -> Any:
            with collectives.serving("test", here.placement):
                large, _, many, rows = replica_context.reduce_gradients(
                    gradients, **model._reduction
                )
            return [large, many, tf.convert_to_tensor(rows)]

        sums = tf.function(lambda reduce=reduce: here.strategy.run(reduce), autograph=False)()
        found[name] = [value.numpy().tolist() for value in sums]
    return found

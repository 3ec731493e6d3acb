"""Numbers that are looked at from inside a step, or at one moment of a run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support.behaviours.common import X, Y, behaviour, behaviour_at, fit, here, model
from tests.support.behaviours.graphs import is_collective
from tests.support.models import of_two_outputs
from tfmulti import prepare
from tfmulti.distribution import collectives, replica_context

ONE_LEFT = {"x": X[:25], "y": Y[:25]}  # of a batch of 24: the last has one row
OWN_STATISTICS = {"sync_batch_norm": False}


def _normalized(**options: Any) -> keras.Model:
    """Returns a model whose first layer normalizes: its statistics are those of the data."""
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        made = prepare(
            keras.Sequential(
                [
                    keras.Input((6,)),
                    keras.layers.BatchNormalization(momentum=0.5),
                    keras.layers.Dense(3, "softmax"),
                ]
            ),
            **OWN_STATISTICS,
        )
        made.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", **options)
    return made


def _own_folder() -> Path:
    return Path(tempfile.mkdtemp(dir=here.shared.parent))


def _statistics(made: keras.Model) -> list[list[list[float]]]:
    """Returns moving mean and variance as each local replica has them."""
    layer = made.layers[0]
    return [
        [value.numpy().tolist() for value in here.strategy.experimental_local_results(v.value)]
        for v in (layer.moving_mean, layer.moving_variance)
    ]


@behaviour
def own_statistics_are_averaged_by_rows() -> Any:
    """Returns them after an epoch, in the model and in a file saved in the epoch's middle."""
    made = _normalized()
    path = _own_folder() / "model.keras"

    class Save(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                self.model.save(path)

    fit(made, x=X[:61], y=Y[:61], shuffle=False, epochs=1, callbacks=[Save()])
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        saved = keras.models.load_model(path, compile=False).layers[0]
    early = [
        keras.ops.convert_to_numpy(v).tolist() for v in (saved.moving_mean, saved.moving_variance)
    ]
    return [_statistics(made), early]


@behaviour
def own_statistics_of_several_steps_an_execution() -> Any:
    made = _normalized(steps_per_execution=3)
    fit(made, **ONE_LEFT, shuffle=False, epochs=1)
    return _statistics(made)


@behaviour
def own_statistics_without_rows() -> Any:
    made = _normalized()
    history = fit(made, **ONE_LEFT, shuffle=False, epochs=1, validation_data=(X, Y))
    evaluated = made.evaluate(X, Y, verbose=0)
    path = _own_folder() / "model.keras"
    made.save(path)
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        alone = keras.models.load_model(path).evaluate(X, Y, verbose=0)
    return [history["val_loss"][0], evaluated, alone, _statistics(made)]


@behaviour
def frozen_layers_stay_as_they_are() -> Any:
    """Layers that do not learn are no moving statistics, even where rounding would move them."""
    made = _normalized()
    made.layers[0].trainable = False
    made.layers[0].moving_mean.assign(np.linspace(0.1, 0.7, 6))
    fit(made, epochs=1)
    return _statistics(made)[0]


def _drawn(layer: keras.layers.Layer, x: np.ndarray) -> list[np.ndarray]:
    """Returns what a random layer makes of the rows, in two calls."""

    class Always(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def call(self, x: Any) -> Any:
            return self.layer(x, training=True)

    with here.strategy.scope():
        made = prepare(Always())
    return [made.predict(x, batch_size=len(x), verbose=0) for _ in range(2)]


@behaviour
def masks_of_dropout() -> Any:
    with here.strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=4)
    return [found.tolist() for found in _drawn(layer, np.ones((13, 40), np.float32))]


@behaviour
def one_mask_for_all_rows() -> Any:
    with here.strategy.scope():
        layer = keras.layers.Dropout(0.5, noise_shape=(1, 40), seed=4)
    return _drawn(layer, np.ones((13, 40), np.float32))[0].tolist()


@behaviour
def augmented_images() -> Any:
    with here.strategy.scope():
        layer = keras.layers.RandomTranslation(0.3, 0.3, seed=4)
    images = np.arange(7 * 25, dtype=np.float32).reshape(7, 5, 5, 1)
    return [found.tolist() for found in _drawn(layer, images)]


class Chooses(keras.layers.Layer):
    """Draws what cannot be drawn row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(9)

    def call(self, x: Any, training: bool = False) -> Any:
        chosen = keras.random.categorical(keras.ops.zeros_like(x), 30, seed=self.seed)
        return keras.ops.cast(chosen, "float32")


@behaviour
def choices_differ_between_replicas() -> Any:
    with here.strategy.scope():
        layer = Chooses()
    return _drawn(layer, np.zeros((8, 10), np.float32))[0].tolist()


@behaviour
def weights_start_equal() -> Any:
    """Returns the weights of a model that each worker would draw differently."""
    keras.utils.set_random_seed(100 + here.place.rank)
    with here.strategy.scope():
        made = prepare(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]))
    return [
        value.numpy().tolist()
        for value in here.strategy.experimental_local_results(made.weights[0].value)
    ]


@behaviour
def overflow_on_one_replica_skips_the_step() -> Any:
    """Returns steps taken and the scale after a batch whose last row overflows float16."""
    x = X.copy()
    x[47] = 6e4  # in the second batch of 24; times the weights it is beyond 65504
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with here.strategy.scope():
            optimizer = keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.01), initial_scale=64.0
            )
        made = model(keras.layers.Dense(8, dtype="float32"), optimizer=optimizer)
    finally:
        keras.config.set_dtype_policy("float32")
    made.layers[0].kernel.assign(np.full((6, 8), 0.5, np.float32))
    fit(made, x=x, epochs=1, shuffle=False)
    weights = [weight.tolist() for weight in made.get_weights()]
    finite = all(np.isfinite(np.asarray(weight)).all() for weight in weights)
    steps = int(keras.ops.convert_to_numpy(optimizer.iterations))
    return [steps, float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)), finite, weights]


@behaviour
def running_logs() -> Any:
    """Returns the logs of every step, as a progress bar shows them."""
    seen: list[list[float]] = []

    class Record(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append([float(logs["loss"]), float(logs["accuracy"])])

    fit(model(), x=X[:61], y=Y[:61], epochs=2, callbacks=[Record()])
    return seen


@behaviour
def losses_of_outputs() -> Any:
    """Returns each output's loss as evaluated, and as Keras has it: the mean over the batches."""
    x = np.concatenate([X, X[:, :2]], 1)[:61]
    y = {"kind": Y[:61], "size": x[:, :1] ** 2}
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        made = prepare(of_two_outputs())
        made.compile("sgd", {"kind": "sparse_categorical_crossentropy", "size": "mse"})
    found = made.evaluate(x, y, batch_size=24, verbose=0, return_dict=True)
    predicted = made.predict(x, verbose=0)
    kind = -np.log(predicted["kind"][np.arange(61), y["kind"]])
    size = np.square(predicted["size"] - y["size"]).mean(-1)
    batches = [slice(at, at + 24) for at in range(0, 61, 24)]
    expected = [
        float(np.mean([values[rows].mean() for rows in batches])) for values in (kind, size)
    ]
    return [found["kind_loss"], found["size_loss"], *expected]


class Adds(keras.Model):
    """A step of its own that sums the losses of its rows."""

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


def _with_own_step(*, twice: bool, **prepared: Any) -> keras.Model:
    with here.strategy.scope():
        made = prepare(Adds(twice), **prepared)
        made.compile(keras.optimizers.SGD(0.1))
    return made


@behaviour
def sum_in_a_step_of_its_own() -> Any:
    return fit(_with_own_step(twice=False))


@behaviour
def microbatches_and_two_updates() -> Any:
    return fit(_with_own_step(twice=True, microbatches=2))


@behaviour
def microbatches_and_a_loss_of_one_number() -> Any:
    def loss(y_true: Any, y_pred: Any) -> Any:
        return tf.reduce_mean(tf.square(y_true - y_pred[:, :1]))

    return fit(model(loss=loss, metrics=None, prepared={"microbatches": 2}))


class ClipsByItself(keras.Model):
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


@behaviour
def microbatches_and_a_clip_of_its_own() -> Any:
    with here.strategy.scope():
        made = prepare(ClipsByItself(), microbatches=2)
        made.compile("sgd")
    return fit(made)


@behaviour
def no_microbatches() -> Any:
    return model(prepared={"microbatches": 0})


@behaviour
def one_update_a_step_with_microbatches() -> Any:
    """Returns the steps that the optimizer and the callbacks count."""
    steps: list[int] = []

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            steps.append(batch)

    made = model(prepared={"microbatches": 5})
    fit(made, callbacks=[Count()])
    return [int(keras.ops.convert_to_numpy(made.optimizer.iterations)), len(steps)]


@behaviour
def prepared_again() -> Any:
    """Returns the losses of one step of a model that was prepared, used, and prepared anew."""
    with here.strategy.scope():
        norm = keras.layers.BatchNormalization()
    made = model(norm)
    start = made.get_weights()
    found = []
    for own in (True, False, True):
        prepare(made, sync_batch_norm=own)
        made.set_weights(start)
        found.append(made.train_on_batch(X[:24], Y[:24])[0])
    return found


class TwoAdams(keras.Model):
    """A step that updates its layers by optimizers of its own, which have slots."""

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


@behaviour
def two_adams_of_its_own() -> Any:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        made = prepare(TwoAdams())
        made.compile()
    history = fit(made, x=X[:61], y=Y[:61], shuffle=False)
    return [history, [weight.tolist() for weight in made.get_weights()]]


@behaviour
def an_optimizer_for_each_layer() -> Any:
    """MultiOptimizer: Adam for the first layer, SGD for the rest."""
    with here.strategy.scope():
        adam, sgd = keras.optimizers.Adam(0.1), keras.optimizers.SGD(0.1)
        optimizer = keras.optimizers.MultiOptimizer(
            lambda variable: adam if tuple(variable.shape) == (6, 8) else sgd
        )
    made = model(optimizer=optimizer)
    history = fit(made, x=X[:61], y=Y[:61], shuffle=False)
    return [history, [weight.tolist() for weight in made.get_weights()]]


@behaviour
def data_of_unknown_length() -> Any:
    """Returns steps that the optimizer counts, and the history; and those of known length."""
    found = []
    for known in (True, False):
        with here.strategy.scope():
            mask, adam = keras.layers.Dropout(0.5, seed=1), keras.optimizers.Adam(0.1)
        made = model(mask, optimizer=adam)
        data = tf.data.Dataset.from_tensor_slices((X[:61], Y[:61])).batch(24)
        data = data if known else data.filter(lambda *_: True)
        history = fit(made, x=data, y=None, batch_size=None, validation_data=data)
        found.append([int(keras.ops.convert_to_numpy(adam.iterations)), history])
    return found


class Unseeded(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x + 0.01 * keras.random.normal(keras.ops.shape(x))


@behaviour
def noise_without_a_seed() -> Any:
    with here.strategy.scope():
        layer = Unseeded()
    return fit(model(layer), epochs=1)


class StepInAFunction(keras.Model):
    """A train_step that is compiled already."""

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
    """A train_step that updates within a condition."""

    def train_step(self, data: Any) -> dict[str, Any]:
        loss, gradients = self.computed(data)
        if loss > 0.1:
            self.optimizer.apply(gradients, self.trainable_variables)
        return {"mean_loss": loss}


def _fit_own(made: keras.Model) -> Any:
    keras.utils.set_random_seed(1)
    prepare(made).compile("sgd")
    history = fit(made, x=X[:61], y=Y[:61], shuffle=False)
    return [history, [weight.tolist() for weight in made.get_weights()]]


@behaviour
def a_step_in_a_function() -> Any:
    with here.strategy.scope():
        return _fit_own(StepInAFunction())


@behaviour
def an_update_in_a_condition() -> Any:
    with here.strategy.scope():
        return _fit_own(UpdatesSometimes())


@behaviour
def a_stateful_layer() -> Any:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        layers = [
            keras.Input(batch_shape=(12, 6)),
            keras.layers.Reshape((6, 1)),
            keras.layers.LSTM(4, stateful=True),
            keras.layers.Dense(3, "softmax"),
        ]
        made = prepare(keras.Sequential(layers))
        made.compile("sgd", "sparse_categorical_crossentropy")
    return fit(made, x=X[:24], y=Y[:24], batch_size=12)


@behaviour
def parts_of_different_rows() -> Any:
    data = tf.data.Dataset.from_tensors((X[:24], Y[:12])).repeat(2)
    return fit(model(), x=data, y=None, batch_size=None)


@behaviour
def parts_of_different_rows_found_later() -> Any:
    forms = (tf.TensorSpec((None, 6)), tf.TensorSpec((None,), tf.int64))
    data = tf.data.Dataset.from_generator(
        lambda: iter([(X[:24], Y[:24]), (X[:24], Y[:12])]), output_signature=forms
    )
    return fit(model(), x=data, y=None, batch_size=None)


@behaviour
def a_part_of_one_number() -> Any:
    data = tf.data.Dataset.from_tensors((X[:24], Y[:24], 1.0))
    return fit(model(), x=data, y=None, batch_size=None)


@behaviour
def learning_rates_and_best_models() -> Any:
    """Returns what callbacks that decide by the metrics did, epoch by epoch."""
    c = keras.callbacks
    path = _own_folder() / "best.keras"
    saved: list[float] = []

    class Best(c.ModelCheckpoint):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            super().on_epoch_end(epoch, logs)
            saved.append(float(self.best))

    with here.strategy.scope():
        optimizer = keras.optimizers.SGD(2.0)
    made = model(optimizer=optimizer)
    history = fit(
        made,
        epochs=12,
        validation_split=0.25,
        callbacks=[
            Best(path, save_best_only=True),
            c.ReduceLROnPlateau(patience=0, factor=0.5, monitor="val_loss"),
            c.EarlyStopping(patience=4, restore_best_weights=True),
        ],
    )
    return [history["learning_rate"], history["val_loss"], saved, made.get_weights()[0].tolist()]


@behaviour
def gradients_in_half_the_bytes() -> Any:
    """Returns the weights after training with each compression, two steps an execution."""
    found = {}
    for name in ("none", "float16", "bfloat16"):
        made = model(prepared={"gradient_compression": name}, steps_per_execution=2)
        fit(made)
        found[name] = [weight.tolist() for weight in made.get_weights()]
    return found


@behaviour
def what_gradients_travel_as() -> Any:
    """Returns the types of the collectives of two gradients, and of an embedding's rows."""
    found = {}
    for name in ("none", "float16", "bfloat16"):
        made = model(prepared={"gradient_compression": name})
        rows = tf.IndexedSlices(tf.ones([2, 4]), tf.constant([0, 3]), tf.constant([9, 4]))
        gradients = [tf.ones([1000, 600]), tf.ones([1000, 400]), rows]

        def reduce(made: Any = made, gradients: Any = gradients) -> Any:
            with collectives.serving("test", here.place):
                return replica_context.reduce_gradients(gradients, **made._wire)

        step = tf.function(lambda reduce=reduce: here.strategy.run(reduce))
        graph = step.get_concrete_function().graph.as_graph_def()
        nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
        types = [n.attr["Tin"].list.type[0] for n in nodes if is_collective(n)]
        found[name] = [tf.as_dtype(type).name for type in types]
    return found


@behaviour_at("multi_worker_mirrored")
def sums_in_half_the_bytes() -> Any:
    """Returns the sums of three gradients over the workers, with each compression.

    One of 2048 and of ones, which float16 would lose one by one; one of a shape that the
    workers do not divide, packed with another of many digits.
    """
    first = here.place.is_chief
    digits = np.random.default_rng(here.place.rank).standard_normal([40, 50]).astype(np.float32)
    found = {}
    for name in ("none", "float16", "bfloat16"):
        made = model(prepared={"gradient_compression": name})
        gradients = [
            tf.fill([2, 2], 2048.0 if first else 1.0),
            None,
            tf.constant(digits),
            tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2])),
        ]

        def reduce(made: Any = made, gradients: Any = gradients) -> Any:
            with collectives.serving("test", here.place):
                large, _, many, rows = replica_context.reduce_gradients(gradients, **made._wire)
            return [large, many, tf.convert_to_tensor(rows)]

        sums = tf.function(lambda reduce=reduce: here.strategy.run(reduce), autograph=False)()
        found[name] = [value.numpy().tolist() for value in sums]
    return found

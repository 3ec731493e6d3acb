"""What users do beside plain training; each behaviour leaves a small result."""

from __future__ import annotations

import contextlib
import pickle
import random
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tests.support.behaviours.common import X, Y, behaviour, behaviour_at, fit, here, model
from tfmulti import prepare
from tfmulti.distribution.agreement import gather, gather_bytes
from tfmulti.training.input import pipeline


@behaviour
def file_callbacks_share_a_folder() -> Any:
    c = keras.callbacks
    fit(
        model(),
        epochs=3,
        validation_split=0.25,
        callbacks=[
            c.ModelCheckpoint(here.shared / "best.keras", save_best_only=True),
            c.ModelCheckpoint(here.shared / "w.weights.h5", save_weights_only=True),
            c.CSVLogger(here.shared / "log.csv"),
            c.TensorBoard(here.shared / "tb"),
        ],
    )
    if not here.place.is_chief:
        return "chief's"
    events = len(list(here.shared.glob("tb/train/events*")))
    return [
        (here.shared / "log.csv").read_text().count("\n"),
        events,
        sorted(path.name for path in here.shared.iterdir()),
    ]


@behaviour
def checkpoints_keep_their_paths() -> Any:
    """Returns whether they have them after training, also after one that fails."""
    path = here.shared / "kept.keras"
    checkpoint = keras.callbacks.ModelCheckpoint(path)

    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            raise RuntimeError("in a callback")

    fit(model(), epochs=1, callbacks=[checkpoint])
    kept = [checkpoint.filepath == str(path)]
    with contextlib.suppress(RuntimeError):
        fit(model(), epochs=1, callbacks=[checkpoint, Fails()])
    return [*kept, checkpoint.filepath == str(path)]


@behaviour
def deciding_callbacks_decide_alike() -> Any:
    c = keras.callbacks
    made = model()
    return fit(
        made,
        epochs=20,
        validation_split=0.25,
        callbacks=[
            c.EarlyStopping(patience=1, min_delta=1.0),
            c.ReduceLROnPlateau(patience=1, min_delta=1.0),
            c.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1)),
        ],
    )


@behaviour
def one_worker_stops_within_an_epoch() -> Any:
    seen = []

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(batch)
            if here.place.rank == here.place.workers - 1 and len(seen) == 6:
                self.model.stop_training = True

    history = fit(model(), epochs=5, callbacks=[Stop()])
    return [len(seen), len(history["loss"])]


@behaviour
def one_worker_stops_at_the_end_of_an_epoch() -> Any:
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if here.place.rank == here.place.workers - 1 and epoch == 1:
                self.model.stop_training = True

    return len(fit(model(), epochs=5, callbacks=[Stop()])["loss"])


@behaviour
def nan_on_one_replica_stops_all() -> Any:
    y = np.zeros((96, 3), np.float32)
    y[47] = np.nan  # in the second batch, the last replica's part
    history = fit(
        model(loss="mse", metrics=None),
        y=y,
        shuffle=False,
        epochs=3,
        callbacks=[keras.callbacks.TerminateOnNaN()],
    )
    return [len(history["loss"]), str(history["loss"][-1])]


@behaviour
def global_generators_after_each_call() -> Any:
    """What Python's and NumPy's generators give next: no call draws, as with plain Keras."""
    made = model()
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(96, seed=3).batch(24)
    found = [_next_numbers()]
    for call in (
        lambda: fit(made),
        lambda: fit(made, x=data, y=None, batch_size=None),
        lambda: made.evaluate(X, Y, verbose=0),
        lambda: made.predict(X, verbose=0),
    ):
        call()
        found.append(_next_numbers())
    return found


class Noisy(keras.Model):
    """Draws without a seed: Keras makes its generator by one draw from Python's."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        return super().train_step((x + keras.random.normal(tf.shape(x)), y))


@behaviour
def global_generators_after_a_draw_without_a_seed() -> Any:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        inputs = keras.Input((6,))
        made = prepare(Noisy(inputs, keras.layers.Dense(3, "softmax")(inputs)))
        made.compile("sgd", "sparse_categorical_crossentropy")
    before, python = _next_numbers(), random.getstate()
    random.randint(1, int(1e9))
    drawn = _next_numbers()
    random.setstate(python)
    fit(made)
    return [before, drawn, _next_numbers()]


class NoisyThroughout(Noisy):
    def test_step(self, data: Any) -> Any:
        x, y = data
        return super().test_step((x + keras.random.normal(tf.shape(x)), y))


@behaviour
def saved_by_all_to_one_file() -> Any:
    """Each worker loads what is there after its own save: a whole file, whoever wrote it last."""
    made = model()
    fit(made)
    path, weights = here.shared / "of_all.keras", here.shared / "of_all.weights.h5"
    for _ in range(5):
        made.save(path)
        made.save_weights(weights)
        loaded = keras.models.load_model(path)
        loaded.load_weights(weights)
    left = [file.name for file in here.shared.glob(".partial-*")] if here.place.workers == 1 else []
    return [loaded.predict(X[:3], verbose=0).tolist(), left]


@behaviour
def draws_without_a_seed_go_on() -> Any:
    """Training, evaluation and a callback draw from one generator, as with plain Keras."""
    keras.utils.set_random_seed(1)
    drawn: list[float] = []

    class Drawing(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            drawn.append(float(keras.random.uniform(())))

    with here.strategy.scope():
        inputs = keras.Input((6,))
        made = prepare(NoisyThroughout(inputs, keras.layers.Dense(3, "softmax")(inputs)))
        made.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    history = fit(made, shuffle=False, validation_data=(X, Y), callbacks=[Drawing()])
    return [history, drawn, made.evaluate(X, Y, verbose=0)]


@behaviour
def long_chain_after_a_mean_over_the_rows() -> Any:
    """More operations than Python can call within each other."""

    class Chain(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            x = inputs - tf.reduce_mean(inputs, 0)
            for _ in range(1500):
                x = x * 1.001 + 0.001
            return x

    return fit(model(Chain()), shuffle=False, epochs=1)


@behaviour
def dropout_after_a_layer_of_its_own() -> Any:
    """In evaluation Dropout gives out the tensor that it is given."""

    class Rectifier(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return tf.concat([tf.nn.relu(inputs), tf.nn.relu(-inputs)], -1)

    made = model(Rectifier(), keras.layers.Dropout(0.5, seed=1))
    return fit(made, shuffle=False, validation_data=(X[:40], Y[:40]))


def _next_numbers() -> list[float]:
    states = random.getstate(), np.random.get_state()
    numbers = [random.random(), np.random.rand()]
    random.setstate(states[0])
    np.random.set_state(states[1])
    return numbers


@behaviour
def two_fits_shuffle_differently() -> Any:
    """Though neither draws from NumPy's generator."""
    orders: list[list[float]] = []
    made = model(optimizer="sgd")
    made.optimizer.learning_rate = 0.0

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            orders[-1].append(float(logs["loss"]))

    for _ in range(2):
        orders.append([])
        fit(made, epochs=1, callbacks=[Note()])
    return orders


@behaviour
def shuffled_arrays() -> Any:
    return fit(model())


@behaviour
def differently_seeded_workers_share_one_order() -> Any:
    """The chief's weights and its order of the data hold for all."""
    keras.utils.set_random_seed(10 + here.place.rank)
    with here.strategy.scope():
        made = prepare(keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "softmax")]))
        made.compile("sgd", "sparse_categorical_crossentropy")
    history = fit(made)
    return [history, [weight.tolist() for weight in made.get_weights()]]


@behaviour
def seeded_dataset() -> Any:
    made = model()  # sets TensorFlow's seed, which a Dataset's own is combined with
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(96, seed=3).batch(24)
    return fit(made, x=data, y=None, batch_size=None)


@behaviour
def different_data_on_each_worker() -> Any:
    data = tf.data.Dataset.from_tensor_slices((X + here.place.rank, Y)).batch(24)
    return fit(model(), x=data, y=None, batch_size=None)


@behaviour_at("multi_worker_mirrored")
def batches_whose_digests_differ_by_one() -> Any:
    """A sum of so large numbers in float32 would not tell them apart."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(24)
    digest = tf.constant(2**24 - 1 - here.place.rank, tf.int32)
    with mock.patch.object(pipeline, "_digest", return_value=digest):
        return fit(model(), x=data, y=None, batch_size=None)


@behaviour_at("multi_worker_mirrored")
def numbers_gathered_from_each_worker() -> Any:
    """Returns numbers that float32 and int32 would round, and bytes of several lengths."""
    rank = here.place.rank
    long = bytes(range(256)) * 20_000  # longer than one all-reduce
    lengthy = gather_bytes(here.strategy, long if rank else None) == [None, long]
    short = gather_bytes(here.strategy, b"\x00\x80" * rank) == [b"", b"\x00\x80"]
    return [gather(here.strategy, [-(2**62) - rank, 0, rank]), lengthy, short]


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return X[index * 24 : (index + 1) * 24], Y[index * 24 : (index + 1) * 24]


@behaviour
def shuffled_pydataset() -> Any:
    return fit(model(), x=Batches(), y=None, batch_size=None)


@behaviour
def pydataset_with_readers() -> Any:
    return fit(model(), x=Batches(workers=2), y=None, batch_size=None)


@behaviour
def generator() -> Any:
    def batches() -> Any:
        while True:
            yield X[:24], Y[:24]

    return fit(model(), x=batches(), y=None, batch_size=None, steps_per_epoch=3)


@behaviour
def one_row_in_the_last_batch_shuffled() -> Any:
    return fit(model(), x=X[:25], y=Y[:25])


@behaviour
def validation_dataset_beside_arrays() -> Any:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
    made = model()
    history = fit(made, validation_data=data)
    made.evaluate(X, Y, verbose=0)
    made.predict(X, verbose=0)
    return [history, sorted(made.history.history) == sorted(history)]


class OptimizerInDict(keras.Model):
    """Keeps its optimizer where attributes alone do not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(3)
        self.kept = {"a": [keras.optimizers.SGD(0.5)]}

    def call(self, x: Any) -> Any:
        return self.out(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
            )
        weights = self.trainable_variables
        self.kept["a"][0].apply(tape.gradient(loss, weights), weights)
        return {"mean_loss": loss}


def _trained_with(optimizer: Any = None) -> Any:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        made = prepare(OptimizerInDict())
        made.compile()
        if optimizer is not None:
            made.kept = Hidden(optimizer())
    history = fit(made, shuffle=False, batch_size=25)
    return [history, [weight.tolist() for weight in made.get_weights()]]


@behaviour
def optimizer_in_a_dict() -> Any:
    return _trained_with()


class Hidden:
    """Gives out an optimizer like a dict of lists, but is none."""

    def __init__(self, optimizer: Any) -> None:
        self._get = lambda: optimizer

    def __getitem__(self, key: str) -> Any:
        return [self._get()]


@behaviour
def optimizer_out_of_sight() -> Any:
    return _trained_with(lambda: keras.optimizers.SGD(0.5))


@behaviour
def class_weight_of_several_outputs() -> Any:
    fit(model(), y={"a": Y, "b": Y}, class_weight={0: 2.0})


@behaviour
def ragged_array() -> Any:
    fit(model(), x=tf.ragged.constant([[1.0], [2.0, 3.0]] * 48))


@behaviour
def interrupted_and_restored() -> Any:
    """Epochs seen by a second fit with the same BackupAndRestore, after a first that failed."""

    class Fail(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise OSError("power cut")

    folder = here.shared / f"restore-{here.place.rank}"
    with contextlib.suppress(OSError):
        fit(model(), epochs=4, callbacks=[keras.callbacks.BackupAndRestore(folder), Fail()])
    made = model()
    made.fit(
        X,
        Y,
        batch_size=24,
        epochs=4,
        verbose=0,
        callbacks=[keras.callbacks.BackupAndRestore(folder)],
    )
    return made.history.epoch


@behaviour
def copies() -> Any:
    made = model()
    fit(made)
    again = pickle.loads(pickle.dumps(made))
    return bool(np.array_equal(again.get_weights()[0], made.get_weights()[0]))


@behaviour
def evaluates_fully_after_a_stop() -> Any:
    made = model()
    fit(made)
    first = made.evaluate(X, Y, verbose=0)
    made.stop_training = True
    return [first, made.evaluate(X, Y, verbose=0)]


@behaviour
def several_inputs_and_outputs() -> Any:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
        joined = keras.layers.Concatenate()([a, b])
        made = prepare(
            keras.Model(
                {"a": a, "b": b},
                {
                    "label": keras.layers.Dense(3, "softmax", name="label")(joined),
                    "value": keras.layers.Dense(1, name="value")(joined),
                },
            )
        )
        made.compile(
            "adam",
            {"label": "sparse_categorical_crossentropy", "value": "mse"},
            loss_weights={"label": 1.0, "value": 0.5},
            metrics={"label": "accuracy"},
        )
    history = fit(made, x={"a": X, "b": X}, y={"label": Y, "value": X[:, :1]})
    found = made.predict({"a": X, "b": X}, verbose=0)
    return [history, {name: list(value.shape) for name, value in found.items()}]


@behaviour
def batch_normalization_and_dropout_run() -> Any:
    with here.strategy.scope():
        extra = [keras.layers.BatchNormalization(synchronized=True), keras.layers.Dropout(0.3)]
    made = model(*extra)
    return bool(np.isfinite(fit(made, validation_data=(X, Y))["val_loss"]).all())


@behaviour
def embedding() -> Any:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        made = prepare(
            keras.Sequential(
                [
                    keras.Input((7,), dtype="int32"),
                    keras.layers.Embedding(20, 4),
                    keras.layers.GlobalAveragePooling1D(),
                    keras.layers.Dense(3, "softmax"),
                ]
            )
        )
        made.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy")
    return fit(made, x=np.arange(96 * 7).reshape(96, 7) % 20)


class Gan(keras.Model):
    """Two optimizers, a train_step and a compile of its own, and no call()."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([keras.Input((2,)), keras.layers.Dense(6)])
        self.judge = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        self.generator_loss = keras.metrics.Mean("generator")
        self.judge_loss = keras.metrics.Mean("judge")

    def compile(self, optimizers: Any, loss: Any) -> None:
        super().compile()
        self.generator_optimizer, self.judge_optimizer = optimizers
        self.loss_function = loss

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.generator_loss, self.judge_loss]

    def train_step(self, x: Any) -> dict[str, Any]:
        noise, rows = tf.ones((tf.shape(x)[0], 2)), tf.shape(x)[0]
        with tf.GradientTape() as tape:
            loss = self.loss_function(tf.ones((rows, 1)), self.judge(x)) + self.loss_function(
                tf.zeros((rows, 1)), self.judge(self.generator(noise))
            )
        weights = self.judge.trainable_weights
        self.judge_optimizer.apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            fooled = self.loss_function(tf.ones((rows, 1)), self.judge(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.generator_optimizer.apply(tape.gradient(fooled, weights), weights)
        self.generator_loss.update_state(fooled)
        self.judge_loss.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}


@behaviour
def two_optimizers() -> Any:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        made = prepare(Gan())
        made.compile(
            [keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)],
            keras.losses.BinaryCrossentropy(from_logits=True),
        )
    return fit(made, y=None, shuffle=False)


class ExtraLogs(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(3, "softmax")

    def call(self, x: Any) -> Any:
        return self.out(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        return {**super().train_step(data), "mean_input": tf.reduce_mean(data[0])}


@behaviour
def logs_that_are_no_metrics() -> Any:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        made = prepare(ExtraLogs())
        made.compile("sgd", "sparse_categorical_crossentropy")
    history = fit(made, shuffle=False, batch_size=25)
    return [history["mean_input"][-1], float(X[75:].mean()), history["loss"]]


@behaviour
def one_batch_at_a_time() -> Any:
    made = model()
    return [
        made.train_on_batch(X[:25], Y[:25]),
        made.test_on_batch(X, Y, return_dict=True),
        made.predict_on_batch(X[:5]).tolist(),
    ]


@behaviour
def mixed_float16() -> Any:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        made = model()
        history = fit(made, epochs=4)["loss"]
        return [history, float(keras.ops.convert_to_numpy(made.optimizer.dynamic_scale))]
    finally:
        keras.config.set_dtype_policy("float32")


@behaviour
def saved_as_plain_keras_and_loaded_again() -> Any:
    made = model()
    fit(made)
    file = Path(tempfile.mkdtemp()) / "model.keras"
    made.save(file)
    with here.strategy.scope():
        again = prepare(keras.saving.load_model(file))
    same = np.array_equal(made.predict(X, verbose=0), again.predict(X, verbose=0))
    return [
        type(made).__name__,
        isinstance(made, keras.Sequential),
        same,
        fit(again, shuffle=False) == fit(made, shuffle=False),
    ]


@behaviour
def not_compiled() -> Any:
    with here.strategy.scope():
        made = prepare(keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)]))
    fit(made)


@behaviour
def no_keras_model() -> Any:
    prepare(lambda x: x)


@behaviour
def a_make_train_function_of_its_own() -> Any:
    class Own(keras.Sequential):
        def make_train_function(self, force: bool = False) -> None:
            """Nothing."""

    with here.strategy.scope():
        prepare(Own([keras.Input((6,)), keras.layers.Dense(3)]))


@behaviour
def distributed_dataset() -> Any:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(24)
    fit(model(), x=here.strategy.experimental_distribute_dataset(data), y=None, batch_size=None)


@behaviour
def dataset_with_targets_beside_it() -> Any:
    fit(model(), x=tf.data.Dataset.from_tensor_slices((X, Y)).batch(24))


@behaviour
def weights_of_two_kinds() -> Any:
    fit(model(), class_weight={0: 2.0}, sample_weight=np.ones(96))


@behaviour
def validation_split_of_a_dataset() -> Any:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(24)
    fit(model(), x=data, y=None, batch_size=None, validation_split=0.5)


@behaviour
def validation_split_of_nothing() -> Any:
    fit(model(), validation_split=0.999)


@behaviour
def empty_dataset() -> Any:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(24).take(0)
    fit(model(), x=data, y=None, batch_size=None)


@behaviour
def data_that_ends_early() -> Any:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(24)
    return len(fit(model(), x=data, y=None, batch_size=None, steps_per_epoch=6)["loss"])


@behaviour
def backup_and_restore() -> Any:
    return len(
        fit(model(), callbacks=[keras.callbacks.BackupAndRestore(here.shared / "b")])["loss"]
    )


@behaviour
def evaluating_an_empty_dataset() -> Any:
    made = model()
    made.evaluate(tf.data.Dataset.from_tensor_slices((X, Y)).batch(24).take(0), verbose=0)


def _of_known_classes(y_true: Any, y_pred: Any) -> Any:
    tf.debugging.assert_less(tf.cast(y_true, tf.int32), 3)
    return keras.losses.sparse_categorical_crossentropy(y_true, y_pred)


@behaviour
def used_after_an_error() -> Any:
    """Returns what a call raised, and what the next ones give, with and without it."""
    found, raised = [], ""
    for fails in (True, False):
        made = model(loss=_of_known_classes)
        if fails:
            made.evaluate(X, Y, batch_size=24, verbose=0)
            made.predict(X, batch_size=24, verbose=0)
            try:
                fit(made, y=Y + 1, shuffle=False)
            except tf.errors.OpError as error:
                raised = type(error).__name__
        history = fit(made)
        figures = made.evaluate(X, Y, batch_size=24, verbose=0)
        outputs = made.predict(X, batch_size=24, verbose=0).tolist()
        found.append([history, figures, outputs, [w.tolist() for w in made.get_weights()]])
    return raised, found

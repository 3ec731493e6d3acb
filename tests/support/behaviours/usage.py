"""Does what users do besides plain training, and makes their mistakes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pickle
import random
import threading
import time
import types
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tests.support.behaviours.common import X, Y, classifier, fit, here, weights_of
from tfmulti import prepare
from tfmulti.distribution import connections
from tfmulti.distribution.agreement import broadcast, gather, gather_bytes
from tfmulti.distribution.connections import made_channel
from tfmulti.distribution.replica_context import metric_variables
from tfmulti.distribution.transport import channel
from tfmulti.launch.heartbeat import BUSY, FIRST, heartbeat
from tfmulti.training.input import pipeline
from tfmulti.training.state.run_state import metric_states


def files_of_callbacks_in_a_shared_folder() -> Any:
    """Returns on the chief the numbers of log lines and of event files, and all names of files."""
    c = keras.callbacks
    fit(
        classifier(),
        epochs=3,
        validation_split=0.25,
        callbacks=[
            c.ModelCheckpoint(here.shared / "best.keras", save_best_only=True),
            c.ModelCheckpoint(here.shared / "w.weights.h5", save_weights_only=True),
            c.CSVLogger(here.shared / "log.csv"),
            c.TensorBoard(here.shared / "tb"),
        ],
    )
    if not here.placement.is_chief:
        return None
    events = len(list(here.shared.glob("tb/train/events*")))
    return [
        (here.shared / "log.csv").read_text().count("\n"),
        events,
        sorted(path.name for path in here.shared.iterdir()),
    ]


def path_of_a_model_checkpoint() -> Any:
    """Returns whether the callback has its path again after a fit, and after one that fails."""
    path = here.shared / "kept.keras"
    checkpoint = keras.callbacks.ModelCheckpoint(path)
    has_its_path = []

    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            raise RuntimeError("in a callback")

    for callbacks in ([checkpoint], [checkpoint, Fails()]):
        with contextlib.suppress(RuntimeError):
            fit(classifier(), epochs=1, callbacks=callbacks)
        has_its_path.append(checkpoint.filepath == str(path))
    return has_its_path


def early_stopping_and_learning_rate_callbacks() -> Any:
    c = keras.callbacks
    return fit(
        classifier(),
        epochs=20,
        validation_split=0.25,
        callbacks=[
            c.EarlyStopping(patience=1, min_delta=1.0),
            c.ReduceLROnPlateau(patience=1, min_delta=1.0),
            c.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1)),
        ],
    )


def one_worker_stops_within_an_epoch() -> Any:
    """Returns the steps and the epochs of a fit in which one worker sets `stop_training`."""
    seen = []

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(batch)
            if here.placement.rank == here.placement.workers - 1 and len(seen) == 6:
                self.model.stop_training = True

    history = fit(classifier(), epochs=5, callbacks=[Stop()])
    return [len(seen), len(history["loss"])]


def one_worker_stops_at_the_end_of_an_epoch() -> Any:
    """Returns the number of epochs."""

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if here.placement.rank == here.placement.workers - 1 and epoch == 1:
                self.model.stop_training = True

    return len(fit(classifier(), epochs=5, callbacks=[Stop()])["loss"])


def nan_on_one_replica_stops_all() -> Any:
    y = np.zeros((96, 3), np.float32)
    # In the second batch, a row of the last replica.
    y[47] = np.nan
    history = fit(
        classifier(loss="mse", metrics=None),
        y=y,
        shuffle=False,
        epochs=3,
        callbacks=[keras.callbacks.TerminateOnNaN()],
    )
    return [len(history["loss"]), str(history["loss"][-1])]


def global_generators_after_each_call() -> Any:
    """Returns the next numbers of Python's and NumPy's generators before and after each call."""
    model = classifier()
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(96, seed=3).batch(24)
    found = [_next_numbers()]
    for call in (
        lambda: fit(model),
        lambda: fit(model, x=data, y=None, batch_size=None),
        lambda: model.evaluate(X, Y, verbose=0),
        lambda: model.predict(X, verbose=0),
    ):
        call()
        found.append(_next_numbers())
    return found


class Noisy(keras.Model):
    """Draws without a seed in training. Keras seeds its generator by one draw from Python's."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        return super().train_step((x + keras.random.normal(tf.shape(x)), y))


def global_generators_after_a_draw_without_a_seed() -> Any:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        inputs = keras.Input((6,))
        model = prepare(Noisy(inputs, keras.layers.Dense(3, "softmax")(inputs)))
        model.compile("sgd", "sparse_categorical_crossentropy")
    before, python = _next_numbers(), random.getstate()
    random.randint(1, int(1e9))
    drawn = _next_numbers()
    random.setstate(python)
    fit(model)
    return [before, drawn, _next_numbers()]


class NoisyInEvaluation(Noisy):
    def test_step(self, data: Any) -> Any:
        x, y = data
        return super().test_step((x + keras.random.normal(tf.shape(x)), y))


def every_worker_saves_to_one_file() -> Any:
    """Each worker loads the file after its own save. It is complete, whoever wrote it last."""
    model = classifier()
    fit(model)
    path, weights = here.shared / "model.keras", here.shared / "model.weights.h5"
    for _ in range(5):
        model.save(path)
        model.save_weights(weights)
        loaded = keras.models.load_model(path)
        loaded.load_weights(weights)
    # Other workers may still be saving.
    is_alone = here.placement.workers == 1
    left = [file.name for file in here.shared.glob(".partial-*") if is_alone]
    return [loaded.predict(X[:3], verbose=0).tolist(), left]


def random_draws_without_a_seed() -> Any:
    """Training, evaluation and a callback draw from one generator."""
    keras.utils.set_random_seed(1)
    drawn: list[float] = []

    class Drawing(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            drawn.append(float(keras.random.uniform(())))

    with here.strategy.scope():
        inputs = keras.Input((6,))
        model = prepare(NoisyInEvaluation(inputs, keras.layers.Dense(3, "softmax")(inputs)))
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    history = fit(model, shuffle=False, validation_data=(X, Y), callbacks=[Drawing()])
    return [history, drawn, model.evaluate(X, Y, verbose=0)]


def mean_over_rows_before_1200_operations() -> Any:
    """Python cannot nest so many calls as this layer has operations after the mean."""

    class Chain(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            x = inputs - tf.reduce_mean(inputs, 0)
            for _ in range(600):
                x = x * 1.001 + 0.001
            return x

    return fit(classifier(Chain()), shuffle=False, epochs=1)


def dropout_after_a_custom_layer() -> Any:
    """In evaluation Dropout returns the tensor of the custom layer itself."""

    class Rectifier(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return tf.concat([tf.nn.relu(inputs), tf.nn.relu(-inputs)], -1)

    model = classifier(Rectifier(), keras.layers.Dropout(0.5, seed=1))
    return fit(model, shuffle=False, validation_data=(X[:40], Y[:40]))


def _next_numbers() -> list[float]:
    states = random.getstate(), np.random.get_state()
    numbers = [random.random(), np.random.rand()]
    random.setstate(states[0])
    np.random.set_state(states[1])
    return numbers


def optimizers_built_outside_the_scope() -> Any:
    """Returns the losses of optimizers that the user builds before `fit`."""
    losses = []
    for optimizer in (keras.optimizers.Adam, keras.optimizers.Adafactor):
        with here.strategy.scope():
            model = classifier(optimizer=optimizer(0.01))
        model.optimizer.build(model.trainable_variables)
        losses.append(fit(model)["loss"])
    return losses


class PullsTowardsZero(keras.callbacks.Callback):
    """Changes the weights after each batch by an optimizer of its own."""

    def __init__(self, scope: Any) -> None:
        super().__init__()
        with scope:
            self.optimizer = keras.optimizers.Adam(0.01)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        weights = self.model.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.model(X[:8]) ** 2)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


def optimizer_of_a_callback() -> Any:
    """Returns the losses and weights of a model that a callback changes by an optimizer."""
    model = classifier(optimizer="sgd")
    losses = fit(model, callbacks=[PullsTowardsZero(here.strategy.scope())])["loss"]
    return losses, weights_of(model)


def optimizer_of_a_callback_outside_the_scope() -> Any:
    fit(classifier(optimizer="sgd"), callbacks=[PullsTowardsZero(contextlib.nullcontext())])


def _asked() -> list[Any]:
    context = tf.distribute.get_replica_context()
    return [
        tf.distribute.get_strategy().num_replicas_in_sync,
        context.num_replicas_in_sync,
        tf.distribute.has_strategy(),
    ]


def what_a_step_finds_of_the_strategy() -> Any:
    """Returns what the user's code, code of `tf.function`, and Keras' own code find in a step."""
    found: dict[str, Any] = {}
    # Keras' own functions have such names of modules.
    of_keras = types.FunctionType(_asked.__code__, {"__name__": "keras.src.any", "tf": tf})

    class Asks(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            found["user"], found["keras"] = _asked(), of_keras()
            found["autograph"] = tf.function(_asked)() and tf.autograph.to_graph(_asked)()
            return super().train_step(data)

    fit(classifier(kind=Asks, prepared={"verify": False}), epochs=1)
    return found


def two_fits_shuffle_differently() -> Any:
    """Returns the losses of the steps of each fit, with a learning rate of 0."""
    orders: list[list[float]] = []
    model = classifier(optimizer="sgd")
    model.optimizer.learning_rate = 0.0
    # With a seed of TensorFlow both have the order of plain Keras, which is the same.
    tf.random.set_seed(None)

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            orders[-1].append(float(logs["loss"]))

    for _ in range(2):
        orders.append([])
        fit(model, epochs=1, callbacks=[Note()])
    return orders


def shuffled_arrays() -> Any:
    return fit(classifier())


def workers_with_different_seeds() -> Any:
    """Returns history and weights, which follow from the chief's seed."""
    keras.utils.set_random_seed(10 + here.placement.rank)
    with here.strategy.scope():
        model = prepare(keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "softmax")]))
        model.compile("sgd", "sparse_categorical_crossentropy")
    history = fit(model)
    return [history, weights_of(model)]


def dataset_shuffled_with_a_seed() -> Any:
    # The model first, because it sets TensorFlow's seed, and a Dataset combines it with its own.
    model = classifier()
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(96, seed=3).batch(24)
    return fit(model, x=data, y=None, batch_size=None)


def different_data_on_each_worker() -> Any:
    data = tf.data.Dataset.from_tensor_slices((X + here.placement.rank, Y)).batch(24)
    return fit(classifier(), x=data, y=None, batch_size=None)


def prediction_of_fixed_rows() -> None:
    """A layer makes a tensor with as many rows as the shape of its input says."""

    class Fixed(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x + tf.zeros((x.shape[0], 1))

    with here.strategy.scope():
        model = prepare(keras.Sequential([keras.layers.Dense(3), Fixed()]))
    model.predict(X[:8], verbose=0)


def other_values_to_predict_on_each_worker() -> Any:
    return classifier().predict(X + here.placement.rank, verbose=0)


def more_rows_to_predict_on_one_worker() -> Any:
    return classifier().predict(X[: 24 + 24 * here.placement.rank], batch_size=8, verbose=0)


def other_batches_to_predict_on_each_worker() -> Any:
    data = tf.data.Dataset.from_tensor_slices(X + here.placement.rank).batch(24)
    return classifier().predict(data, verbose=0)


def another_batch_to_predict_on_each_worker() -> Any:
    return classifier().predict_on_batch(X[:24] + here.placement.rank)


def batches_whose_digests_differ_by_one() -> Any:
    """Reads batches whose digests differ too little for sums in float32."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(24)
    digest = tf.constant(2**24 - 1 - here.placement.rank, tf.int32)
    with mock.patch.object(pipeline, "_digest", return_value=digest):
        return fit(classifier(), x=data, y=None, batch_size=None)


def numbers_gathered_from_each_worker() -> Any:
    """Returns numbers that float32 and int32 would round, and whether all bytes arrived."""
    rank, others = here.placement.rank, range(1, here.placement.workers)
    # Longer than one message of TensorFlow.
    long = bytes(range(256)) * 20_000
    lengthy = gather_bytes(here.strategy, long if rank else None) == [None, *[long for _ in others]]
    short = gather_bytes(here.strategy, b"\x00\x80" * rank)
    of_chief = [
        broadcast(here.strategy, None if rank else data) == data
        for data in (long + b"+", b"+", b"", None)
    ]
    arrived = [
        lengthy,
        short == [b"", *(b"\x00\x80" * r for r in others)],
        *of_chief,
        broadcast(here.strategy, b"123"[rank:]) == b"123",
    ]
    return [gather(here.strategy, [-(2**62) - rank, 0, rank]), arrived]


def numbers_gathered_without_a_channel() -> Any:
    """Returns the same, and whether a worker has sent none of it over the channel."""
    gather(here.strategy, [1])
    made = made_channel(here.placement)
    assert made is not None
    before = made.sent_bytes
    with mock.patch.object(connections, "_channel_between", return_value=None):
        found = numbers_gathered_from_each_worker()
    return [*found, made.sent_bytes == before]


def numbers_gathered_where_a_worker_cannot_listen() -> Any:
    """Returns the same as `numbers_gathered_from_each_worker`, after the workers connect again."""
    connections._end_channels()
    no_files = mock.patch.object(connections, "listen", side_effect=OSError("no files left"))
    try:
        with no_files if here.placement.rank else contextlib.nullcontext():
            found = numbers_gathered_from_each_worker()
        assert made_channel(here.placement) is None
    finally:
        connections._connected.clear()
    return found


def exchanges_after_errors() -> Any:
    """Returns this worker's two errors, and the ranks that it gathers after each of them.

    First one worker gathers numbers and the other one bytes. Then one worker is interrupted after
    it has sent its part, so the other one gets that part, and fails at the next exchange.
    """
    rank, found = here.placement.rank, []
    try:
        if rank:
            gather_bytes(here.strategy, b"1234")
        else:
            gather(here.strategy, [1, 2])
    except tf.errors.UnavailableError as error:
        found.append(error.message)
    found.append(gather(here.strategy, [rank]))
    interrupted = mock.patch.object(channel.Channel, "receive", side_effect=SystemExit(3))
    try:
        with contextlib.nullcontext() if rank else interrupted:
            gather(here.strategy, [7])
            gather(here.strategy, [8])
    except (SystemExit, tf.errors.UnavailableError) as error:
        found.append(type(error).__name__)
    return [*found, gather(here.strategy, [rank])]


def what_travels_over_the_channel_after_a_step() -> Any:
    """Returns whether votes and the states of metrics do, so that this worker may end after them.

    TensorFlow's own collective may fail on the other worker if this one ends right after it.
    """
    model = classifier()
    fit(model)
    gather(here.strategy, [1])
    made = made_channel(here.placement)
    assert made is not None
    counts = [made.sent_bytes]
    gather(here.strategy, [1])
    counts.append(made.sent_bytes)
    with heartbeat().working(model):
        metric_states(model, metric_variables(model))
        # As in a checkpoint: this worker may still wait for others.
        assert heartbeat().record().phase != BUSY
    counts.append(made.sent_bytes)
    # On GPUs the steps do not use the channel. Exchanges outside of a step use it.
    on_gpus = dataclasses.replace(here.placement, gpus=("/device:GPU:0",))
    assert (connections.channel_of(on_gpus), made_channel(on_gpus)) == (None, None)
    ranks = connections.exchange(on_gpus, "ranks", str(here.placement.rank).encode())
    assert ranks == [b"0", b"1"]
    counts.append(made.sent_bytes)
    return [after > before for before, after in itertools.pairwise(counts)]


def heartbeat_while_it_waits_for_bytes() -> Any:
    """Returns whether worker 0 has told that it may wait before worker 1 has given its bytes."""
    told, given_up = here.shared / "told", here.shared / "given up"

    def wait_for(happened: Callable[[], bool]) -> bool:
        until = time.monotonic() + 30
        while not happened() and time.monotonic() < until:
            time.sleep(0.01)
        return happened()

    def look() -> None:
        waits = wait_for(lambda: heartbeat().record().phase == FIRST)
        (told if waits else given_up).touch()

    if here.placement.is_chief:
        threading.Thread(target=look).start()
    else:
        wait_for(lambda: told.exists() or given_up.exists())
    gather_bytes(here.strategy, b"")
    return told.exists()


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return X[index * 24 : (index + 1) * 24], Y[index * 24 : (index + 1) * 24]


def pydataset_without_and_with_reader_threads() -> Any:
    return [
        fit(classifier(), x=data, y=None, batch_size=None)
        for data in (Batches(), Batches(workers=2))
    ]


def python_generator() -> Any:
    def batches() -> Any:
        while True:
            yield X[:24], Y[:24]

    return fit(classifier(), x=batches(), y=None, batch_size=None, steps_per_epoch=3)


def one_row_in_the_last_batch() -> Any:
    return fit(classifier(), x=X[:25], y=Y[:25])


def validation_on_a_dataset() -> Any:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
    model = classifier()
    history = fit(model, validation_data=data)
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    return [history, sorted(model.history.history) == sorted(history)]


class OptimizerInAContainer(keras.Model):
    """Keeps its optimizer in a list of a dict, or in a container of the user's own."""

    def __init__(self, container: Callable[[], Any]) -> None:
        super().__init__()
        self.out = keras.layers.Dense(3)
        self.kept = container()

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


def _trained_with_optimizer_in(container: Callable[[], Any]) -> Any:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        model = prepare(OptimizerInAContainer(container))
        model.compile()
    history = fit(model, shuffle=False, batch_size=25)
    return [history, weights_of(model)]


def optimizer_in_a_dict_of_lists() -> Any:
    return _trained_with_optimizer_in(lambda: {"a": [keras.optimizers.SGD(0.5)]})


class Container:
    """Returns an optimizer by index, like a dict of lists, but has no attribute that holds it."""

    def __init__(self) -> None:
        optimizer = keras.optimizers.SGD(0.5)
        self._get = lambda: optimizer

    def __getitem__(self, key: str) -> Any:
        return [self._get()]


def optimizer_in_a_closure() -> Any:
    return _trained_with_optimizer_in(Container)


class Elsewhere:
    """Holds a variable that is no attribute of a model."""

    last: tf.Variable


class ChangesElsewhere(keras.layers.Layer):
    """Changes all of a variable elsewhere, or some of its rows."""

    def __init__(self, *, by_rows: bool) -> None:
        super().__init__()
        self.by_rows = by_rows

    def call(self, x: Any) -> Any:
        mean = tf.reduce_mean(x)[None]
        if self.by_rows:
            Elsewhere.last.scatter_add(tf.IndexedSlices(mean, [0]))
        else:
            Elsewhere.last.assign_add(mean)
        return x


def variable_elsewhere(kind: str) -> Any:
    """Returns a variable that an evaluation has changed, of which only a class knows."""
    with here.strategy.scope() if "in the scope" in kind else contextlib.nullcontext():
        Elsewhere.last = tf.Variable([0.0], trainable=False)
    with here.strategy.scope():
        layer = ChangesElsewhere(by_rows="rows" in kind)
        model = keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(3)])
        model.compile("sgd", "sparse_categorical_crossentropy")
    prepare(model).evaluate(X[:40], Y[:40], batch_size=20, verbose=0)
    return np.asarray(Elsewhere.last).tolist()


def class_weight_with_two_outputs() -> Any:
    fit(classifier(), y={"a": Y, "b": Y}, class_weight={0: 2.0})


def ragged_input() -> Any:
    fit(classifier(), x=tf.ragged.constant([[1.0], [2.0, 3.0]] * 48))


def backup_and_restore_after_an_error() -> Any:
    """Returns the epochs of a second fit with BackupAndRestore, after a first that failed."""

    class Fail(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise OSError("power cut")

    folder = here.shared / "backup"
    with contextlib.suppress(OSError):
        fit(classifier(), epochs=4, callbacks=[keras.callbacks.BackupAndRestore(folder), Fail()])
    model = classifier()
    fit(model, epochs=4, callbacks=[keras.callbacks.BackupAndRestore(folder)])
    return model.history.epoch


def pickled_model() -> Any:
    """Returns whether a copy of a trained model has its weights."""
    model = classifier()
    fit(model)
    again = pickle.loads(pickle.dumps(model))
    return bool(np.array_equal(again.get_weights()[0], model.get_weights()[0]))


def evaluate_after_stop_training() -> Any:
    model = classifier()
    fit(model)
    first = model.evaluate(X, Y, verbose=0)
    model.stop_training = True
    return [first, model.evaluate(X, Y, verbose=0)]


def several_inputs_and_outputs() -> Any:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
        joined = keras.layers.Concatenate()([a, b])
        model = prepare(
            keras.Model(
                {"a": a, "b": b},
                {
                    "label": keras.layers.Dense(3, "softmax", name="label")(joined),
                    "value": keras.layers.Dense(1, name="value")(joined),
                },
            )
        )
        model.compile(
            "adam",
            {"label": "sparse_categorical_crossentropy", "value": "mse"},
            loss_weights={"label": 1.0, "value": 0.5},
            metrics={"label": "accuracy"},
        )
    history = fit(model, x={"a": X, "b": X}, y={"label": Y, "value": X[:, :1]})
    found = model.predict({"a": X, "b": X}, verbose=0)
    return [history, {name: list(value.shape) for name, value in found.items()}]


def batch_normalization_and_dropout() -> Any:
    with here.strategy.scope():
        extra = [keras.layers.BatchNormalization(synchronized=True), keras.layers.Dropout(0.3)]
    model = classifier(*extra)
    return bool(np.isfinite(fit(model, validation_data=(X, Y))["val_loss"]).all())


def embedding() -> Any:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        model = prepare(
            keras.Sequential(
                [
                    keras.Input((7,), dtype="int32"),
                    keras.layers.Embedding(20, 4),
                    keras.layers.GlobalAveragePooling1D(),
                    keras.layers.Dense(3, "softmax"),
                ]
            )
        )
        model.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy")
    return fit(model, x=np.arange(96 * 7).reshape(96, 7) % 20)


class Gan(keras.Model):
    """Has two optimizers, a custom `train_step` and `compile`, and no `call`."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([keras.Input((2,)), keras.layers.Dense(6)])
        self.discriminator = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        self.generator_loss = keras.metrics.Mean("generator")
        self.discriminator_loss = keras.metrics.Mean("discriminator")

    def compile(self, optimizers: Any, loss: Any) -> None:
        super().compile()
        self.generator_optimizer, self.discriminator_optimizer = optimizers
        self.loss_function = loss

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.generator_loss, self.discriminator_loss]

    def train_step(self, x: Any) -> dict[str, Any]:
        noise, rows = tf.ones((tf.shape(x)[0], 2)), tf.shape(x)[0]
        with tf.GradientTape() as tape:
            loss = self.loss_function(
                tf.ones((rows, 1)), self.discriminator(x)
            ) + self.loss_function(tf.zeros((rows, 1)), self.discriminator(self.generator(noise)))
        weights = self.discriminator.trainable_weights
        self.discriminator_optimizer.apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            generator_loss = self.loss_function(
                tf.ones((rows, 1)), self.discriminator(self.generator(noise))
            )
        weights = self.generator.trainable_weights
        self.generator_optimizer.apply(tape.gradient(generator_loss, weights), weights)
        self.generator_loss.update_state(generator_loss)
        self.discriminator_loss.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}


def gan_with_two_optimizers() -> Any:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        model = prepare(Gan())
        model.compile(
            [keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)],
            keras.losses.BinaryCrossentropy(from_logits=True),
        )
    return fit(model, y=None, shuffle=False)


class ExtraLogs(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(3, "softmax")

    def call(self, x: Any) -> Any:
        return self.out(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        return {**super().train_step(data), "mean_input": tf.reduce_mean(data[0])}


def logs_that_are_not_metrics() -> Any:
    """Returns a log of the last step, the mean of its one row, and the losses."""
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        model = prepare(ExtraLogs())
        model.compile("sgd", "sparse_categorical_crossentropy")
    history = fit(model, shuffle=False, batch_size=25)
    return [history["mean_input"][-1], float(X[75:].mean()), history["loss"]]


def calls_on_single_batches() -> Any:
    model = classifier()
    return [
        model.train_on_batch(X[:25], Y[:25]),
        model.test_on_batch(X, Y, return_dict=True),
        model.predict_on_batch(X[:5]).tolist(),
    ]


def mixed_float16() -> Any:
    """Returns the losses and the last loss scale."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = classifier()
        history = fit(model, epochs=4)["loss"]
        return [history, float(keras.ops.convert_to_numpy(model.optimizer.dynamic_scale))]
    finally:
        keras.config.set_dtype_policy("float32")


@keras.saving.register_keras_serializable("tfmulti_tests", "encoder")
class Encoder(keras.Model):
    """A model of a class that is registered under another name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.dense = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.dense(x)


def saved_inside_another_model() -> Any:
    """Returns whether a model with a trained model inside predicts the same once it is loaded."""
    with here.strategy.scope():
        encoder = Encoder()
        encoder.compile("sgd", "mse")
    fit(prepare(encoder), y=X[:, :3])
    outer = keras.Sequential([keras.Input((6,)), encoder, keras.layers.Dense(2)])
    file = here.shared / f"outer_{here.placement.rank}.keras"
    outer.save(file)
    loaded = keras.saving.load_model(file)
    return np.array_equal(loaded.predict(X, verbose=0), outer.predict(X, verbose=0))


def saved_loaded_and_trained_again() -> Any:
    """Returns the model's class, whether it is Keras' own, and whether the copies are equal."""
    model = classifier()
    fit(model)
    file = here.shared / f"model_{here.placement.rank}.keras"
    model.save(file)
    with here.strategy.scope():
        again = prepare(keras.saving.load_model(file))
    same = np.array_equal(model.predict(X, verbose=0), again.predict(X, verbose=0))
    return [
        type(model).__name__,
        isinstance(model, keras.Sequential),
        same,
        fit(again, shuffle=False) == fit(model, shuffle=False),
    ]


def a_second_model_that_is_not_prepared() -> Any:
    """Returns the warnings of a model in the scope that shares a layer with a prepared model."""
    with here.strategy.scope():
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(4)(inputs)
        encoder = keras.Model(inputs, hidden)
        encoder.compile("sgd", "mse")
        model = prepare(keras.Model(inputs, keras.layers.Dense(3, "softmax")(hidden)))
        model.compile("sgd", "sparse_categorical_crossentropy")
    found = []
    for call in (
        lambda: fit(model),
        lambda: encoder.predict(X, verbose=0),
        lambda: encoder.fit(X, X[:, :4], verbose=0),
        lambda: encoder.evaluate(X, X[:, :4], verbose=0),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        found.append(["is not prepared" in str(w.message) for w in caught].count(True))
    return found


def weights_set_on_the_chief_alone(when: str) -> Any:
    """The chief alone sets weights or the rate; then all workers call `fit` or another method."""
    model = classifier()
    is_chief = here.placement.is_chief

    class Set(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if is_chief and when == "rate in a callback":
                self.model.optimizer.learning_rate = 0.5

    fit(model)
    if is_chief and when.startswith("before"):
        model.set_weights([2 * value for value in model.get_weights()])
    if when == "before evaluate":
        model.evaluate(X, Y, verbose=0)
    elif when == "before predict":
        model.predict(X, verbose=0)
    elif when == "before train_on_batch":
        model.train_on_batch(X, Y)
    elif when == "between calls of predict_on_batch":
        for call in range(20):
            if is_chief and call == 5:
                model.set_weights([2 * value for value in model.get_weights()])
            model.predict_on_batch(X)
    else:
        fit(model, epochs=2, callbacks=[Set()])


def a_metric_updated_by_a_callback(when: str) -> Any:
    """Returns the warnings of a callback that updates a metric by hand on all workers."""
    with here.strategy.scope():
        counted = keras.metrics.SparseCategoricalAccuracy("counted")
        own = keras.metrics.Mean("own")
    model = classifier(metrics=[counted])

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            (counted if when == "of the model" else own).reset_state()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, epochs=2, callbacks=[Count()])
    return [str(w.message) for w in caught if "a callback changes a metric" in str(w.message)]


def fit_without_compile() -> Any:
    with here.strategy.scope():
        model = prepare(keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)]))
    fit(model)


def train_function_by_hand() -> Any:
    model = classifier()
    model.make_train_function()
    model.train_function(iter(tf.data.Dataset.from_tensors((X, Y))))


def prepare_a_function() -> Any:
    prepare(lambda x: x)


def overridden_make_train_function() -> Any:
    class Own(keras.Sequential):
        def make_train_function(self, force: bool = False) -> None: ...

    with here.strategy.scope():
        prepare(Own([keras.Input((6,)), keras.layers.Dense(3)]))


def distributed_dataset() -> Any:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(24)
    fit(
        classifier(), x=here.strategy.experimental_distribute_dataset(data), y=None, batch_size=None
    )


def dataset_with_separate_targets() -> Any:
    fit(classifier(), x=tf.data.Dataset.from_tensor_slices((X, Y)).batch(24))


def class_weight_and_sample_weight() -> Any:
    fit(classifier(), class_weight={0: 2.0}, sample_weight=np.ones(96))


def validation_split_of_a_dataset() -> Any:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(24)
    fit(classifier(), x=data, y=None, batch_size=None, validation_split=0.5)


def validation_split_of_all_rows() -> Any:
    fit(classifier(), validation_split=0.999)


def empty_dataset() -> Any:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(24).take(0)
    fit(classifier(), x=data, y=None, batch_size=None)


def dataset_shorter_than_an_epoch() -> Any:
    """Returns the number of epochs with more steps than the data has."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(24)
    return len(fit(classifier(), x=data, y=None, batch_size=None, steps_per_epoch=6)["loss"])


def backup_and_restore() -> Any:
    fit(classifier(), callbacks=[keras.callbacks.BackupAndRestore(here.shared / "backup")])


def orbax_checkpoint() -> Any:
    # To make one takes the package orbax-checkpoint.
    callback = object.__new__(keras.callbacks.OrbaxCheckpoint)
    fit(classifier(), callbacks=[callback])


def evaluate_an_empty_dataset() -> Any:
    model = classifier()
    model.evaluate(tf.data.Dataset.from_tensor_slices((X, Y)).batch(24).take(0), verbose=0)


def _of_known_classes(y_true: Any, y_pred: Any) -> Any:
    tf.debugging.assert_less(tf.cast(y_true, tf.int32), 3)
    return keras.losses.sparse_categorical_crossentropy(y_true, y_pred)


def calls_after_a_failed_fit() -> Any:
    """Returns what a fit raised, and the results of later calls with and without that fit."""
    found, raised = [], ""
    for fails in (True, False):
        model = classifier(loss=_of_known_classes)
        if fails:
            model.evaluate(X, Y, batch_size=24, verbose=0)
            model.predict(X, batch_size=24, verbose=0)
            try:
                fit(model, y=Y + 1, shuffle=False)
            except tf.errors.OpError as error:
                raised = type(error).__name__
        history = fit(model)
        figures = model.evaluate(X, Y, batch_size=24, verbose=0)
        outputs = model.predict(X, batch_size=24, verbose=0).tolist()
        found.append([history, figures, outputs, weights_of(model)])
    return raised, found

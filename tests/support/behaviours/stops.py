"""Runs that are stopped at a step and go on from their checkpoint, against one that was not."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support.behaviours.common import X, Y, behaviour, behaviour_at, here, model
from tfmulti import Checkpoint
from tfmulti.distribution.replica_slice import current
from tfmulti.errors import ResumeError
from tfmulti.launch.heartbeat import SAVED
from tfmulti.training.state.trainer_state import interrupt

EPOCHS, BATCH, ROWS = 3, 24, 61  # 24, 24, 13


class Stopped(Exception):
    """In place of SIGKILL: everything of the fit is thrown away."""


class StopsAt(keras.callbacks.Callback):
    """Stops after so many steps of this start, or in the evaluation after them."""

    def __init__(self, steps: int, in_evaluation: bool = False) -> None:
        super().__init__()
        self._left, self._in_evaluation = steps, in_evaluation

    def get_state(self) -> Any:
        return {}

    def set_state(self, state: Any) -> None:
        pass

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == 0 and not self._in_evaluation:
            raise Stopped

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._left <= 0 and self._in_evaluation:
            raise Stopped


class Signalled(StopsAt):
    """Gets SIGTERM in the evaluation after so many steps of this start."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps, in_evaluation=True)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._left <= 0 and batch == 0:
            interrupt(self.model, "SIGTERM")


class Counts(keras.callbacks.Callback):
    """A callback of the user's own, whose state is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(float(logs["loss"]))

    def on_test_begin(self, logs: Any = None) -> None:
        self.losses.append(float(np.random.rand()))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(float(logs["loss"]))


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        rows = slice(BATCH * index, BATCH * (index + 1))
        return X[:ROWS][rows], Y[:ROWS][rows]


class Reordered(keras.utils.PyDataset):
    """Five batches, in an order of the user's own that changes after each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.order, self.random = list(range(5)), np.random.default_rng(2)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        rows = slice(12 * self.order[index], 12 * self.order[index] + 12)
        return X[rows], Y[rows]

    def on_epoch_end(self) -> None:
        self.random.shuffle(self.order)


def _slices() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X[:ROWS], Y[:ROWS])).shuffle(ROWS, seed=3)


def _generated() -> Any:
    for start in itertools.cycle(range(0, ROWS, BATCH)):
        yield X[:ROWS][start : start + BATCH], Y[:ROWS][start : start + BATCH]


FEEDS: dict[str, Callable[[], dict[str, Any]]] = {
    "arrays": lambda: {"x": X[:ROWS], "y": Y[:ROWS], "batch_size": BATCH},
    "Dataset": lambda: {"x": _slices().batch(BATCH)},
    "Dataset of unknown length": lambda: {"x": _slices().batch(BATCH).filter(lambda *_: True)},
    "repeated Dataset": lambda: {"x": _slices().repeat().batch(BATCH), "steps_per_epoch": 3},
    "PyDataset": lambda: {"x": Batches()},
    "PyDataset across epochs": lambda: {"x": Reordered(), "steps_per_epoch": 3},
    "PyDataset by its steps": lambda: {"x": Batches(), "steps_per_epoch": 3},
    "generator": lambda: {"x": _generated(), "steps_per_epoch": 3},
}


def _run(
    feed: Callable[[], dict[str, Any]],
    folder: Path | None,
    stop: StopsAt | None,
    steps_per_execution: int = 1,
    extra: Callable[[], list[keras.layers.Layer]] = lambda: [
        keras.layers.Dropout(0.3),
        keras.layers.BatchNormalization(),
    ],
    optimizer: Callable[[], keras.optimizers.Optimizer] = lambda: keras.optimizers.Adam(0.05),
    same_process: bool = False,
    validation: Callable[[], Any] = lambda: (X[60:], Y[60:]),
    prepared: Mapping[str, Any] | None = None,
) -> Any:
    """Returns what a fit leaves, or None where it was stopped.

    With `same_process` Keras goes on counting layers, as where a notebook's cell is run again.
    """
    if not same_process:
        keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        adam = optimizer()
        layers = extra()
    made = model(
        *layers,
        prepared={"seed": 4, "sync_batch_norm": False, **(prepared or {})},
        optimizer=adam,
        steps_per_execution=steps_per_execution,
    )
    c, counts = keras.callbacks, Counts()
    best = c.EarlyStopping("loss", patience=1, restore_best_weights=True)
    callbacks = [
        c.LearningRateScheduler(lambda _, rate: 0.9 * rate),
        c.ReduceLROnPlateau("loss", patience=0, factor=0.5, min_delta=1.0),
        best,
        counts,
    ]
    if folder is not None:
        callbacks.append(Checkpoint(folder, every_steps=2, every_s=None))
    if stop is not None:
        callbacks.append(stop)
    try:
        history = made.fit(
            **feed(),
            epochs=EPOCHS,
            verbose=0,
            callbacks=callbacks,
            validation_data=validation(),
            validation_batch_size=20,
        ).history
    except (Stopped, SystemExit):
        return None
    values = [keras.ops.convert_to_numpy(v) for v in (*made.weights, *adam.variables)]
    digest = hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()
    return [history, counts.losses, digest, float(best.best), int(best.wait)]


def _stopped(feed: Callable[[], dict[str, Any]], stops: list[StopsAt], **options: Any) -> bool:
    whole = _run(feed, None, None, **options)
    with tempfile.TemporaryDirectory() as name:
        for stop in stops:
            assert _run(feed, Path(name), stop, **options) is None
        return bool(_run(feed, Path(name), None, **options) == whole)


# For the time that they take, most are run where they differ from others.
alone = behaviour_at("one_device")
at_workers = behaviour_at("one_device", "multi_worker_mirrored")
WHERE = {"arrays": behaviour, "Dataset of unknown length": at_workers}


def _behaviour(name: str, feed: Callable[[], dict[str, Any]]) -> None:
    def stopped_within_epochs() -> bool:
        """Once after three steps, then after four more."""
        return _stopped(feed, [StopsAt(3), StopsAt(4)])

    stopped_within_epochs.__name__ = f"stopped: {name}"
    WHERE.get(name, alone)(stopped_within_epochs)


for _name, _feed in FEEDS.items():
    _behaviour(_name, _feed)


@at_workers
def stopped_in_the_evaluation() -> bool:
    return _stopped(FEEDS["arrays"], [StopsAt(3, in_evaluation=True)])


def _validation() -> tf.data.Dataset:
    """Has another order each time."""
    return tf.data.Dataset.from_tensor_slices((X[60:], Y[60:])).shuffle(36, seed=9).batch(12)


@at_workers
def signalled_in_the_evaluation() -> bool:
    """In the first epoch, and after the third step from there: in the second."""
    return _stopped(FEEDS["arrays"], [Signalled(3), Signalled(3)], validation=_validation)


@alone
def signalled_in_the_evaluation_of_a_pydataset() -> bool:
    feed = FEEDS["PyDataset"]
    return _stopped(feed, [Signalled(3), Signalled(3)], validation=Reordered)


@behaviour
def stopped_between_executions() -> bool:
    return _stopped(FEEDS["arrays"], [StopsAt(3)], steps_per_execution=2)


@alone
def stopped_and_built_again_in_the_same_process() -> bool:
    return _stopped(FEEDS["arrays"], [StopsAt(4)], same_process=True)


@alone
def stopped_with_bfloat16_variables() -> bool:
    """On one device: TensorFlow does not reduce gradients of two types together."""

    def low() -> list[keras.layers.Layer]:
        return [keras.layers.Dense(8, dtype="bfloat16")]

    return _stopped(FEEDS["arrays"], [StopsAt(4)], extra=low)


class Shakes(keras.layers.Layer):
    """Draws without a seed, in training and in evaluation."""

    def call(self, inputs: Any) -> Any:
        return inputs + 0.1 * keras.random.normal(keras.ops.shape(inputs))


@at_workers
def stopped_after_an_evaluation_drew() -> bool:
    """The stop comes in the second epoch; the first one's evaluation has drawn already."""
    return _stopped(FEEDS["arrays"], [StopsAt(5)], extra=lambda: [Shakes()])


class Noise(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        self.generator = keras.random.SeedGenerator(7)

    def call(self, inputs: Any) -> Any:
        return inputs + 0.1 * keras.random.normal(keras.ops.shape(inputs), seed=self.generator)


class Sometimes(keras.layers.Layer):
    """Calls its layer in training only, or in evaluation only: it is not built before."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.noise, self.when = Noise(), training

    def call(self, inputs: Any, training: bool = False) -> Any:
        # Keras builds a model by a call outside training; only a step's has a share.
        used = training if self.when else not training and current() is not None
        return self.noise(inputs) if used else inputs


@alone
def stopped_with_layers_that_are_built_late() -> bool:
    """On one device: a layer cannot be built in a replica."""
    both = lambda: [Sometimes(True), Sometimes(False)]  # noqa: E731
    return _stopped(FEEDS["arrays"], [StopsAt(5), StopsAt(1)], extra=both)


class Other(keras.layers.Dense):
    pass


@alone
def resumed_with_another_model() -> Any:
    """Returns what is said when the model or its optimizer is another one."""
    said = []
    dense, sgd = keras.layers.Dense, keras.optimizers.SGD
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begun = {"extra": lambda: [dense(8)], "optimizer": lambda: sgd(0.1, momentum=0.9)}
        _run(FEEDS["arrays"], folder, StopsAt(4), **begun)
        for changed in (
            {"extra": lambda: [dense(7)]},
            {"extra": lambda: [Other(8)]},
            {"extra": lambda: [dense(8), dense(8)]},
            {"extra": list},
            {"extra": lambda: [dense(8), keras.layers.Dropout(0.5)]},
            {"extra": lambda: [dense(8, dtype="float16")]},
            {"optimizer": lambda: keras.optimizers.RMSprop(0.1)},
            {"optimizer": lambda: sgd(0.1)},
        ):
            try:
                _run(FEEDS["arrays"], folder, None, **{**begun, **changed})
            except ResumeError as error:
                said.append(str(error).partition(" Build the same")[0])
    return said


@at_workers
def resumed_otherwise() -> Any:
    """Returns what is said when the run that should go on is another one."""
    said: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "b"
        _run(FEEDS["arrays"], folder, StopsAt(4))

        def try_again(**changed: Any) -> None:
            options = {"units": 8, "seed": 4, "rows": ROWS, "resume": "auto", **changed}
            with here.strategy.scope():
                extra = keras.layers.Dense(options["units"])
            made = model(extra, prepared={"seed": options["seed"]})
            rows = options["rows"]
            checkpoint = Checkpoint(options.get("folder", folder), resume=options["resume"])
            try:
                made.fit(X[:rows], Y[:rows], batch_size=BATCH, verbose=0, callbacks=[checkpoint])
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")

        try_again()
        try_again(seed=5)
        try_again(rows=60)
        try_again(resume="never")
        try_again(resume="must", folder=Path(name) / "nothing")
        elsewhere = Path(name) / "of another machine"
        os.environ[SAVED] = json.dumps({str(elsewhere): 4})  # as the launcher tells
        try_again(folder=elsewhere)
        del os.environ[SAVED]
    return said

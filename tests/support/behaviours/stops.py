"""Compares runs that stop and resume from their checkpoint with a run that does not stop."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tests.support.behaviours.common import X, Y, classifier, here
from tfmulti import Checkpoint
from tfmulti.distribution.replica_slice import current
from tfmulti.errors import ResumeError
from tfmulti.launch.heartbeat import SAVED
from tfmulti.training.state.trainer_state import interrupt

# The batches of an epoch have 24, 24 and 13 rows.
EPOCHS, BATCH, ROWS = 3, 24, 61


class Stopped(Exception):
    """Ends a fit in place of SIGKILL: none of its objects is used afterwards."""


class StopsAt(keras.callbacks.Callback):
    """Stops a fit after `steps` steps, or in the evaluation after them."""

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


class SigtermAt(StopsAt):
    """Acts as if SIGTERM came in the evaluation after `steps` steps."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps, in_evaluation=True)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._left <= 0 and batch == 0:
            interrupt(self.model, "SIGTERM")


class RecordsLosses(keras.callbacks.Callback):
    """A user's callback, whose state is an attribute."""

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


class ReorderedBatches(keras.utils.PyDataset):
    """Has five batches in an order that changes after each pass."""

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
    "PyDataset across epochs": lambda: {"x": ReorderedBatches(), "steps_per_epoch": 3},
    "PyDataset by its steps": lambda: {"x": Batches(), "steps_per_epoch": 3},
    "generator": lambda: {"x": _generated(), "steps_per_epoch": 3},
}


def run(
    folder: Path | None,
    stop: StopsAt | None,
    feed: str = "arrays",
    steps_per_execution: int = 1,
    extra: Callable[[], list[keras.layers.Layer]] = lambda: [
        keras.layers.Dropout(0.3),
        keras.layers.BatchNormalization(),
    ],
    optimizer: Callable[[], keras.optimizers.Optimizer] = lambda: keras.optimizers.Adam(0.05),
    same_process: bool = False,
    validation: Callable[[], Any] = lambda: (X[60:], Y[60:]),
    prepared: Mapping[str, Any] | None = None,
    kind: type[keras.Sequential] = keras.Sequential,
    checkpoint: Callable[[Path], Checkpoint] = lambda folder: Checkpoint(
        folder, every_steps=2, every_s=None
    ),
) -> Any:
    """Returns the history, losses, weights and callbacks' states of a fit, or None if it stopped.

    With `same_process` Keras continues to count layers, as if a cell of a notebook runs again.
    """
    if not same_process:
        keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        adam = optimizer()
        layers = extra()
    model = classifier(
        *layers,
        kind=kind,
        prepared={"seed": 4, "sync_batch_norm": False, **(prepared or {})},
        optimizer=adam,
        steps_per_execution=steps_per_execution,
    )
    c, losses = keras.callbacks, RecordsLosses()
    best = c.EarlyStopping("loss", patience=1, restore_best_weights=True)
    callbacks = [
        c.LearningRateScheduler(lambda _, rate: 0.9 * rate),
        c.ReduceLROnPlateau("loss", patience=0, factor=0.5, min_delta=1.0),
        best,
        losses,
    ]
    if folder is not None:
        callbacks.append(checkpoint(folder))
    if stop is not None:
        callbacks.append(stop)
    try:
        history = model.fit(
            **FEEDS[feed](),
            epochs=EPOCHS,
            verbose=0,
            callbacks=callbacks,
            validation_data=validation(),
            validation_batch_size=20,
        ).history
    except (Stopped, SystemExit):
        return None
    values = [keras.ops.convert_to_numpy(v) for v in (*model.weights, *adam.variables)]
    digest = hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()
    return [history, losses.losses, digest, float(best.best), int(best.wait)]


@functools.cache
def uninterrupted(**options: Any) -> Any:
    """Returns what a run without a stop leaves. Behaviours of the same options share it."""
    return run(None, None, **options)


def resumes(*stops: StopsAt, **options: Any) -> bool:
    """Whether a run that stops and resumes ends like one that does not stop, bit for bit."""
    expected = uninterrupted(**{k: v for k, v in options.items() if k != "checkpoint"})
    folder = here.shared / "checkpoints"
    for stop in stops:
        assert run(folder, stop, **options) is None
    return bool(run(folder, None, **options) == expected)


def stopped_within_epochs(case: str) -> bool:
    """The run stops after three steps, then after four more."""
    return resumes(StopsAt(3), StopsAt(4), feed=case)


class EachEpoch(Checkpoint):
    """Makes checkpoints only after epochs, and records their positions."""

    every_epoch = True
    places: tuple[tuple[int, int], ...] = ()

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, every_s=None)
        EachEpoch.places = ()

    def kept(self, epoch: int, step: int, logs: Mapping[str, Any]) -> None:
        assert {"loss", "val_loss"} <= set(logs)
        EachEpoch.places += ((epoch, step),)


def stopped_after_an_epoch(case: str) -> Any:
    """Returns whether the run resumes, and the epochs and steps of its checkpoints.

    The run stops in the second epoch, so its newest checkpoint is from the end of the first.
    """
    return resumes(StopsAt(5), feed=case, checkpoint=EachEpoch), EachEpoch.places


def stopped_in_evaluation() -> bool:
    return resumes(StopsAt(3, in_evaluation=True))


def _reshuffled_validation() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X[60:], Y[60:])).shuffle(36, seed=9).batch(12)


def sigterm_in_evaluation() -> bool:
    """SIGTERM comes in the evaluations of the first and of the second epoch."""
    return resumes(SigtermAt(3), SigtermAt(3), validation=_reshuffled_validation)


def sigterm_in_evaluation_on_a_pydataset() -> bool:
    return resumes(SigtermAt(3), SigtermAt(3), feed="PyDataset", validation=ReorderedBatches)


def stopped_with_two_steps_per_execution() -> bool:
    return resumes(StopsAt(3), steps_per_execution=2)


def stopped_and_built_again_in_the_same_process() -> bool:
    return resumes(StopsAt(4), same_process=True)


def stopped_with_bfloat16_variables() -> bool:
    """Runs on one device: TensorFlow does not reduce gradients of two types together."""

    def low() -> list[keras.layers.Layer]:
        return [keras.layers.Dense(8, dtype="bfloat16")]

    return resumes(StopsAt(4), extra=low)


class UnseededNoise(keras.layers.Layer):
    """Draws without a seed, in training and in evaluation."""

    def call(self, inputs: Any) -> Any:
        return inputs + 0.1 * keras.random.normal(keras.ops.shape(inputs))


def stopped_after_evaluation_drew_random_numbers() -> bool:
    """The run stops in the second epoch, after the evaluation of the first."""
    return resumes(StopsAt(5), extra=lambda: [UnseededNoise()])


class SeededNoise(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        self.generator = keras.random.SeedGenerator(7)

    def call(self, inputs: Any) -> Any:
        return inputs + 0.1 * keras.random.normal(keras.ops.shape(inputs), seed=self.generator)


class NoiseInOneMode(keras.layers.Layer):
    """Calls its layer only in training, or only in evaluation: the first such call builds it."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.noise, self.in_training = SeededNoise(), training

    def call(self, inputs: Any, training: bool = False) -> Any:
        # Keras builds a model by a call outside training, which has no replica slice.
        used = training if self.in_training else not training and current() is not None
        return self.noise(inputs) if used else inputs


def stopped_with_layers_built_late() -> bool:
    """Runs on one device: a layer cannot be built in a replica."""

    def both() -> list[keras.layers.Layer]:
        return [NoiseInOneMode(training=True), NoiseInOneMode(training=False)]

    return resumes(StopsAt(5), StopsAt(1), extra=both)


class Tracking(keras.layers.Layer):
    """Scales by averages that Keras does not track: a `tf.Variable`, and one of a plain object."""

    def __init__(self) -> None:
        super().__init__()
        self.first = tf.Variable(0.0, trainable=False)
        self.plain = types.SimpleNamespace(second=keras.Variable(0.0, trainable=False))

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            average = keras.ops.mean(keras.ops.square(inputs))
            self.first.assign(0.5 * self.first + average)
            self.plain.second.assign(0.8 * self.plain.second + average)
        return inputs / (1 + self.first + self.plain.second)


def stopped_with_variables_outside_of_the_model() -> bool:
    return resumes(StopsAt(4), StopsAt(2), extra=lambda: [Tracking()])


class MeasuredInValidation(keras.Sequential):
    """Makes a metric when a validation is first traced."""

    def test_step(self, data: Any) -> Any:
        logs = super().test_step(data)
        if not hasattr(self, "largest"):
            self.largest = keras.metrics.Mean("largest")
        self.largest.update_state(keras.ops.max(self(data[0]), axis=-1))
        return {**logs, "largest": self.largest.result()}


def stopped_with_a_metric_of_the_validation() -> bool:
    """The run stops in the evaluation of the first epoch, and in the second epoch."""
    stops = StopsAt(3, in_evaluation=True), StopsAt(3)
    return resumes(*stops, kind=MeasuredInValidation)


def fits_of_the_same_model() -> bool:
    """A second `fit` has more epochs. The validation of the first one has made a metric."""

    def history(*epochs: int, folder: Path | None) -> Any:
        model = classifier(kind=MeasuredInValidation, prepared={"seed": 4})
        for count in epochs:
            fitted = model.fit(
                X,
                Y,
                batch_size=BATCH,
                epochs=count,
                verbose=0,
                validation_data=(X, Y),
                callbacks=[Checkpoint(folder)] if folder is not None else [],
            )
        return fitted.history

    return bool(history(1, 3, folder=here.shared / "fits") == history(3, folder=None))


class OtherDense(keras.layers.Dense):
    pass


def resumed_with_another_model() -> Any:
    """Returns the errors where the model or its optimizer differs from the saved one."""
    messages = []
    dense, sgd = keras.layers.Dense, keras.optimizers.SGD
    folder = here.shared / "checkpoints"
    saved = {"extra": lambda: [dense(8)], "optimizer": lambda: sgd(0.1, momentum=0.9)}
    run(folder, StopsAt(4), **saved)
    for changed in (
        {"extra": lambda: [dense(7)]},
        {"extra": lambda: [OtherDense(8)]},
        {"extra": lambda: [dense(8), dense(8)]},
        {"extra": list},
        {"extra": lambda: [dense(8), keras.layers.Dropout(0.5)]},
        {"extra": lambda: [dense(8, dtype="float16")]},
        {"optimizer": lambda: keras.optimizers.RMSprop(0.1)},
        {"optimizer": lambda: sgd(0.1)},
    ):
        try:
            run(folder, None, **{**saved, **changed})
        except ResumeError as error:
            messages.append(str(error).partition(" Build the same")[0])
    return messages


def resumed_with_other_settings() -> Any:
    """Returns the errors where the settings of the run differ from the saved ones."""
    messages: list[str] = []
    folder = here.shared / "checkpoints"
    run(folder, StopsAt(4))

    def try_again(**changed: Any) -> None:
        options = {"units": 8, "seed": 4, "rows": ROWS, "resume": "auto", **changed}
        with here.strategy.scope():
            extra = keras.layers.Dense(options["units"])
        model = classifier(extra, prepared={"seed": options["seed"]})
        rows = options["rows"]
        checkpoint = Checkpoint(options.get("folder", folder), resume=options["resume"])
        try:
            model.fit(X[:rows], Y[:rows], batch_size=BATCH, verbose=0, callbacks=[checkpoint])
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")

    try_again()
    try_again(seed=5)
    try_again(rows=60)
    try_again(resume="never")
    try_again(resume="must", folder=here.shared / "nothing")
    elsewhere = here.shared / "of another machine"
    # The launcher tells the workers of checkpoints on all machines by this variable.
    with mock.patch.dict(os.environ, {SAVED: json.dumps({str(elsewhere): 4})}):
        try_again(folder=elsewhere)
    return messages

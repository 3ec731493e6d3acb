"""Training with local steps (`sync_every`), on several workers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support import diloco
from tests.support.behaviours.common import X, Y, classifier, fit, here, weights_of
from tests.support.behaviours.graphs import collectives_in, graph_of
from tests.support.behaviours.stops import StopsAt, resumes, run
from tfmulti import prepare
from tfmulti.errors import DataError, ModelError, ResumeError
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step import local_steps

EXACT = {"outer_learning_rate": 1.0, "outer_momentum": 0.0}
NESTEROV = {"outer_learning_rate": 0.7, "outer_momentum": 0.9}


def trained_with_local_steps(case: str) -> list[Any]:
    """Returns the weights of a variant."""
    variant = diloco.VARIANTS[case]
    keras.utils.set_random_seed(3)
    with here.strategy.scope():
        model = prepare(variant.build(), **variant.prepared)
    x, y, *weights = variant.data
    if variant.evaluated_first:
        model.evaluate(x, y, batch_size=diloco.BATCH, verbose=0)
    model.fit(
        x,
        y,
        batch_size=diloco.BATCH,
        epochs=diloco.EPOCHS,
        sample_weight=weights[0] if weights else None,
        shuffle=False,
        verbose=0,
    )
    return weights_of(model)


def synchronized_after_each_step() -> Any:
    """Returns the weights of exact training, and of local steps that equal it for plain SGD.

    The masks of the dropout are those of one device in both runs.
    """
    found = []
    for prepared in ({}, {"sync_every": 1, **EXACT}):
        keras.utils.clear_session()
        with here.strategy.scope():
            dropout = keras.layers.Dropout(0.3, seed=6)
        model = classifier(dropout, prepared={"seed": 2, **prepared})
        fit(model, x=X[:61], y=Y[:61], class_weight={0: 2.0, 1: 0.5})
        found.append(weights_of(model))
    return found


def compressed_weight_changes() -> Any:
    """Returns the weights where workers send their changes in float32, and in float16."""
    found = []
    for name in ("none", "float16"):
        keras.utils.clear_session()
        model = classifier(prepared={"seed": 2, "sync_every": 2, "gradient_compression": name})
        fit(model)
        found.append(weights_of(model))
    return found


def collectives_of_local_steps() -> Any:
    """Returns the numbers of collectives in the loop of steps, and in the execution around it."""
    found = {}
    for name, prepared in {"exact": {}, "local": {"sync_every": 4}}.items():
        keras.utils.clear_session()
        model = classifier(
            keras.layers.BatchNormalization(), prepared=prepared, steps_per_execution=4
        )
        fit(model, epochs=1)
        graph = graph_of(model, 4)
        found[name] = [
            len(collectives_in(graph, within_loop=within_loop)) for within_loop in (True, False)
        ]
    return found


def validation_after_local_steps() -> Any:
    """Returns the validation losses, the loss of the trained model, and its weights."""
    model = classifier(keras.layers.BatchNormalization(), prepared={"seed": 1, "sync_every": 3})
    history = fit(model, x=X[:61], y=Y[:61], validation_data=(X[61:], Y[61:]))
    loss, _ = model.evaluate(X[61:], Y[61:], batch_size=24, verbose=0)
    return [history["val_loss"], loss, weights_of(model)]


def stopped_between_local_steps() -> bool:
    """The run stops in the second epoch, and again later."""
    return resumes(StopsAt(3), StopsAt(2), prepared={"sync_every": 2, **NESTEROV})


def stopped_in_evaluation_after_local_steps() -> bool:
    stop = StopsAt(2, in_evaluation=True)
    return resumes(stop, prepared={"sync_every": 2, **NESTEROV})


def stop_training_on_one_worker() -> Any:
    """Returns the steps after which callbacks were called, all steps taken, and the weights."""
    seen: list[int] = []

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(batch)
            if here.placement.rank == 1:
                self.model.stop_training = True

    model = classifier(prepared={"sync_every": 3})
    fit(model, batch_size=8, epochs=1, callbacks=[Stops()])
    return [seen, state_of(model).steps, weights_of(model)]


def optimizer_slots_of_all_workers() -> Any:
    """Returns this worker's slots, those in its checkpoint, and those restored from another.

    The other checkpoint is one of five workers, with the value n in all slots of worker n.
    """
    with here.strategy.scope():
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model = classifier(optimizer=optimizer, prepared={"sync_every": 2, **NESTEROV})
    fit(model, epochs=1)
    kept = local_steps.capture(model)
    own = [np.asarray(v).tolist() for v in model.optimizer.variables]
    of_five = [
        np.stack([value[0] * 0 + n for n in (1, 2, 3, 4, 5)]).astype(value.dtype)
        for value in kept["slots"]
    ]
    local_steps.restore(model, {**kept, "slots": of_five})
    after = [np.asarray(v).tolist() for v in model.optimizer.variables]
    return [own, [value.tolist() for value in kept["slots"]], after, len(kept["velocities"])]


def errors_of_local_steps() -> list[str]:
    """Returns the errors where workers cannot take local steps, or not resume them."""
    messages = []

    def note(function: Any) -> None:
        try:
            function()
        except (DataError, ModelError, ResumeError) as error:
            messages.append(f"{type(error).__name__}: {error}")

    with here.strategy.scope():
        averaging = keras.optimizers.SGD(0.1, use_ema=True)
    note(lambda: fit(classifier(optimizer=averaging, prepared={"sync_every": 2})))
    unknown = tf.data.Dataset.from_tensor_slices((X, Y)).batch(24).filter(lambda *_: True)
    model = classifier(prepared={"sync_every": 2})
    note(lambda: fit(model, x=unknown, y=None, batch_size=None))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(folder, StopsAt(3), prepared={"sync_every": 2})
        note(lambda: run(folder, None, prepared={"sync_every": 3}))
        note(lambda: run(folder, None))
    return messages

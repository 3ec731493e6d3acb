"""Workers that take steps of their own between meetings (`sync_every`)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support import apart
from tests.support.behaviours.common import X, Y, behaviour_at, fit, here, model
from tests.support.behaviours.graphs import collectives_in, graph_of
from tests.support.behaviours.stops import FEEDS, StopsAt, _run, _stopped
from tfmulti import prepare
from tfmulti.errors import DataError, ModelError, ResumeError
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step import local_steps

at_workers = behaviour_at("multi_worker_mirrored")
EXACT = {"outer_learning_rate": 1.0, "outer_momentum": 0.0}
NESTEROV = {"outer_learning_rate": 0.7, "outer_momentum": 0.9}


def _trained(variant: apart.Variant, **prepared: Any) -> list[Any]:
    keras.utils.set_random_seed(3)
    with here.strategy.scope():
        made = prepare(variant.build(), **variant.prepared, **prepared)
    x, y, *weights = variant.data
    if variant.evaluated:
        made.evaluate(x, y, batch_size=apart.BATCH, verbose=0)
    made.fit(
        x,
        y,
        batch_size=apart.BATCH,
        epochs=apart.EPOCHS,
        sample_weight=weights[0] if weights else None,
        shuffle=False,
        verbose=0,
    )
    return [value.tolist() for value in made.get_weights()]


def _behaviour(name: str, variant: apart.Variant) -> None:
    def weights() -> list[Any]:
        return _trained(variant, sync_every=variant.every, **variant.options)

    weights.__name__ = f"apart: {name}"
    at_workers(weights)


for _name, _variant in apart.VARIANTS.items():
    _behaviour(_name, _variant)


@at_workers
def meeting_after_each_step() -> Any:
    """Returns the weights of exact training, and of what is the same for plain SGD.

    With dropout, whose masks are those of one device either way.
    """
    found = []
    for prepared in ({}, {"sync_every": 1, **EXACT}):
        keras.utils.clear_session()
        with here.strategy.scope():
            dropout = keras.layers.Dropout(0.3, seed=6)
        made = model(dropout, prepared={"seed": 2, **prepared})
        fit(made, x=X[:61], y=Y[:61], class_weight={0: 2.0, 1: 0.5})
        found.append([value.tolist() for value in made.get_weights()])
    return found


@at_workers
def meeting_in_half_the_bytes() -> Any:
    """Returns the weights after moves that travelled as they are, and as float16."""
    found = []
    for name in ("none", "float16"):
        keras.utils.clear_session()
        made = model(prepared={"seed": 2, "sync_every": 2, "gradient_compression": name})
        fit(made)
        found.append([value.tolist() for value in made.get_weights()])
    return found


@at_workers
def collectives_of_local_steps() -> Any:
    """Returns how many collectives the compiled loop of steps has, and its whole execution."""
    found = {}
    for name, prepared in {"exact": {}, "apart": {"sync_every": 4}}.items():
        keras.utils.clear_session()
        made = model(keras.layers.BatchNormalization(), prepared=prepared, steps_per_execution=4)
        fit(made, epochs=1)
        graph = graph_of(made, 4)
        found[name] = [
            len(collectives_in(graph, within_loop=within_loop)) for within_loop in (True, False)
        ]
    return found


@at_workers
def validated_apart() -> Any:
    """Returns the losses of the last validation and of the model that is left, and its weights."""
    made = model(keras.layers.BatchNormalization(), prepared={"seed": 1, "sync_every": 3})
    history = fit(made, x=X[:61], y=Y[:61], validation_data=(X[61:], Y[61:]))
    found = made.evaluate(X[61:], Y[61:], batch_size=24, verbose=0)
    return [history["val_loss"], found[0], [value.tolist() for value in made.get_weights()]]


@at_workers
def stopped_apart() -> bool:
    """Whether it ends as a run that was not stopped: in the second epoch, and later again."""
    return _stopped(
        FEEDS["arrays"], [StopsAt(3), StopsAt(2)], prepared={"sync_every": 2, **NESTEROV}
    )


@at_workers
def stopped_apart_in_the_evaluation() -> bool:
    stop = StopsAt(2, in_evaluation=True)
    return _stopped(FEEDS["arrays"], [stop], prepared={"sync_every": 2, **NESTEROV})


@at_workers
def one_worker_wants_to_stop() -> Any:
    """Returns the steps after which the callbacks of this worker were called."""
    seen: list[int] = []

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(batch)
            if here.place.rank == 1:
                self.model.stop_training = True

    made = model(prepared={"sync_every": 3})
    fit(made, batch_size=8, epochs=1, callbacks=[Stops()])
    return [seen, state_of(made).steps, [value.tolist() for value in made.get_weights()]]


@at_workers
def slots_of_other_workers() -> Any:
    """Returns this worker's slots, those in a checkpoint, and those of one of five workers."""
    with here.strategy.scope():
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    made = model(optimizer=optimizer, prepared={"sync_every": 2, **NESTEROV})
    fit(made, epochs=1)
    kept = local_steps.capture(made)
    own = [np.asarray(v).tolist() for v in made.optimizer.variables]
    of_five = [
        np.stack([value[0] * 0 + n for n in (1, 2, 3, 4, 5)]).astype(value.dtype)
        for value in kept["slots"]
    ]
    local_steps.restore(made, {**kept, "slots": of_five})
    after = [np.asarray(v).tolist() for v in made.optimizer.variables]
    return [own, [value.tolist() for value in kept["slots"]], after, len(kept["velocities"])]


@at_workers
def mistakes_of_steps_apart() -> list[str]:
    """Returns what is said where steps cannot be taken apart."""
    said = []

    def note(function: Any) -> None:
        try:
            function()
        except (DataError, ModelError, ResumeError) as error:
            said.append(f"{type(error).__name__}: {error}")

    with here.strategy.scope():
        averaging = keras.optimizers.SGD(0.1, use_ema=True)
    note(lambda: fit(model(optimizer=averaging, prepared={"sync_every": 2})))
    unknown = tf.data.Dataset.from_tensor_slices((X, Y)).batch(24).filter(lambda *_: True)
    made = model(prepared={"sync_every": 2})
    note(lambda: fit(made, x=unknown, y=None, batch_size=None))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _run(FEEDS["arrays"], folder, StopsAt(3), prepared={"sync_every": 2})
        note(lambda: _run(FEEDS["arrays"], folder, None, prepared={"sync_every": 3}))
        note(lambda: _run(FEEDS["arrays"], folder, None))
    return said

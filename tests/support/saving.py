"""A training program that saves its model after each epoch, and resumes at a Dataset's position.

    python -m tests.support.saving FOLDER [STOP]

With STOP, worker 1 ends with exit code 3 after STOP steps. The chief writes the weights to
FOLDER/out.npz.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti import Checkpoint, make_strategy, prepare
from tfmulti.distribution.strategies import placement_of

ROWS, BATCH, EPOCHS = 48, 8, 3


class Stops(keras.callbacks.Callback):
    """Ends the process after a number of steps, or never if the number is 0."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps = steps

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps -= 1
        if self._steps == 0:
            os._exit(3)


def main(folder: str, stop: str = "0") -> None:
    strategy = make_strategy()
    placement = placement_of(strategy)
    x = np.random.default_rng(0).standard_normal((ROWS, 4)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(ROWS, seed=3).batch(BATCH)
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = prepare(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), seed=3)
        model.compile("adam", "mse")
    callbacks = [
        keras.callbacks.ModelCheckpoint(f"{folder}/model.keras"),
        Checkpoint(f"{folder}/checkpoints", every_steps=2, every_s=None),
        Stops(int(stop) if placement.rank == 1 else 0),
    ]
    model.fit(data, epochs=EPOCHS, callbacks=callbacks, verbose=0)
    if placement.is_chief:
        np.savez(f"{folder}/out.npz", *model.get_weights())


if __name__ == "__main__":
    main(*sys.argv[1:])

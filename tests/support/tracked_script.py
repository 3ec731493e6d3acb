"""A user's script that trains on two workers with callbacks of trackers, and one of its own.

python -m tests.support.tracked_script FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import keras
import mlflow
import numpy as np
import wandb
from mlflow.keras.callback import MlflowCallback
from wandb.integration.keras import WandbMetricsLogger

import tfmulti


class Mine(keras.callbacks.Callback):
    """Writes a line for each epoch."""

    chief_only = True

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        with open(self.path, "a") as file:
            file.write(f"{epoch}\n")


class Derived(MlflowCallback):
    """A callback that a user has derived from one of a tracker."""


def main(folder: Path) -> None:
    strategy = tfmulti.make_strategy()
    with strategy.scope():
        model = tfmulti.prepare(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
        model.compile("sgd", "mse")
    rows = np.ones((64, 4), np.float32)
    is_chief = os.environ["RANK"] == "0"
    wandb.init(mode="offline" if is_chief else "disabled", dir=folder)
    if is_chief:
        mlflow.start_run()
    # WandbMetricsLogger can be made only where a run was started.
    callbacks = [Mine(folder / "mine.txt"), Derived(), WandbMetricsLogger()]
    model.fit(rows, rows[:, :1], batch_size=16, epochs=3, verbose=0, callbacks=callbacks)
    if is_chief:
        mlflow.end_run()
    wandb.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""A script that trains on the workers of TF_CONFIG, and stops at a step as its arguments say.

    python -m tests.support.hanging_script FOLDER WORKER HOW [--own-channel=false]

The worker with the rank WORKER stops in its tenth step: `sleep` in a callback for a minute, or
`freeze` by SIGSTOP. With `read` it stops while it reads the data of that step. With `none` nothing
happens, and the training ends when FOLDER/end exists. With `stay` all workers then wait for a file
FOLDER/leave. With `late` the worker comes to `fit` only when FOLDER/end exists, and with `predict`
it sleeps in a batch of `predict`. With `--own-channel=false` TensorFlow's own collectives connect
the workers, as NCCL connects GPUs.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfmulti
from tfmulti.distribution import collectives
from tfmulti.distribution.strategies import placement_of

# Before the first step six times as long may pass.
LEAST_S = (2.0, 0.5)


class Dawdles(keras.callbacks.Callback):
    def __init__(self, folder: Path, how: str) -> None:
        super().__init__()
        self.folder, self.how = folder, how

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 10:
            (self.folder / f"pid-{os.getpid()}").touch()
            if self.how == "sleep":
                self.dawdle()
            if self.how == "freeze":
                self.how = "none"
                os.kill(os.getpid(), signal.SIGSTOP)
        if self.how == "none":
            time.sleep(0.01)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 10 and self.how == "predict":
            self.dawdle()

    def dawdle(self) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until and not (self.folder / "end").exists():
            time.sleep(0.1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if (self.folder / "end").exists():
            self.model.stop_training = True


class Stuck(tfmulti.ArraySource):
    """Data that one worker cannot read for a while."""

    folder: Path | None = None
    reads = 0

    def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
        self.reads += 1
        if self.folder is not None and self.reads == 10:
            wait_for(self.folder / "end")
        super().read_into(indices, epoch, out)


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and not path.exists():
        time.sleep(0.1)


def main(folder: Path, rank: int, how: str) -> None:
    strategy = tfmulti.make_strategy()
    with strategy.scope():
        layers = [keras.Input((4,)), keras.layers.Dense(3, name="mine"), keras.layers.Dense(1)]
        model = tfmulti.prepare(keras.Sequential(layers))
        model.compile("sgd", "mse", steps_per_execution=1)
    rows = np.zeros((400, 4), np.float32)
    own = how if placement_of(strategy).rank == rank else ""
    callbacks = [
        Dawdles(folder, own or "none"),
        tfmulti.Watchdog(folder / "run", least_s=LEAST_S[how == "late"]),
    ]
    data = Stuck((rows, rows[:, :1]))
    data.folder = folder if own == "read" else None
    if own == "late":
        wait_for(folder / "end")
    if how == "predict":
        model.predict(data, batch_size=8, verbose=0, callbacks=callbacks)
        return
    model.fit(data, batch_size=8, epochs=200, verbose=0, callbacks=callbacks)
    print("trained", flush=True)
    if how == "stay":
        wait_for(folder / "leave")


if __name__ == "__main__":
    if sys.argv[4:] == ["--own-channel=false"]:
        # No flag switches the channel off, and this machine has no GPUs.
        collectives.channel_of = lambda placement: None
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])

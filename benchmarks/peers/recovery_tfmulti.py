"""Trains a small network with tfmulti, with a checkpoint every EVERY steps.

python -m tfmulti.launch --nproc-per-node 2 PATH_OF_THIS_FILE FOLDER STEPS EVERY
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfmulti import Checkpoint, make_strategy, prepare
from tfmulti.training.state.trainer_state import state_of

BATCH = 128  # 64 each


class StepTimes(keras.callbacks.Callback):
    """Writes the number of each step, and when it ended."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = open(path, "a", buffering=1)  # noqa: SIM115

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.02)
        self._file.write(f"{state_of(self.model).run.steps} {time.monotonic()}\n")


def main(folder: str, steps: int, every: int) -> None:
    root, rank = Path(folder), os.environ["RANK"]
    (root / f"pid-{rank}").write_text(str(os.getpid()))
    strategy = make_strategy()
    keras.utils.set_random_seed(0)
    layers = keras.layers
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dense(256, "relu"),
                layers.Dense(256, "relu"),
                layers.Dense(10, "softmax"),
            ]
        )
        prepare(model, seed=0)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "sparse_categorical_crossentropy")
    rng = np.random.default_rng(0)
    x = rng.random((BATCH * steps, 64), np.float32)
    y = rng.integers(0, 10, len(x))
    checkpoint = Checkpoint(root / "checkpoints", every_steps=every, every_s=None)
    model.fit(
        x, y, batch_size=BATCH, verbose=0, callbacks=[checkpoint, StepTimes(root / f"steps-{rank}")]
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

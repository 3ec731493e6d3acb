"""Resumes training on a Dataset from the checkpoint of each step, and counts the opened files.

python -m tests.support.resumed_data FOLDER OUT_RANK.json PIPELINE STEP...

Each row of the data is a file. If FOLDER has no checkpoints, the program first trains without a
stop, and makes a checkpoint after each step. Then it resumes from each STEP.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti import make_strategy, prepare
from tfmulti.distribution.strategies import placement_of
from tfmulti.training.checkpoint.callback import Checkpoint

# 2 × 36 rows are 15 batches, the last of 2 rows.
ROWS, BATCH, STEPS, EPOCHS = 36, 5, 15, 2
IN_OPEN, IN_NONBLOCK = 0x20, 0o4000


class Opened:
    """Counts by inotify how often files of a folder are opened."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._file = libc.inotify_init1(IN_NONBLOCK)
        watch = libc.inotify_add_watch(self._file, str(folder).encode(), IN_OPEN)
        assert self._file >= 0
        assert watch >= 0

    def count(self) -> int:
        """Returns how many files were opened since the last call."""
        found = 0
        while True:
            try:
                data = os.read(self._file, 1 << 16)
            except BlockingIOError:
                return found
            while data:
                length = struct.unpack_from("iIII", data)[3]
                found, data = found + (length > 0), data[16 + length :]


class Losses(keras.callbacks.Callback):
    """Records the loss after each step. The chief finishes each checkpoint before the next step."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._checkpoint, self.found = checkpoint, []  # type: ignore[var-annotated]

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._checkpoint.finish()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.found.append(float(logs["loss"]))

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass


def dataset_of(rows: Path, pipeline: str) -> tf.data.Dataset:
    names = [str(rows / f"{row}.bin") for row in range(ROWS)]
    dataset = tf.data.Dataset.from_tensor_slices(names)

    def read(name: tf.Tensor) -> Any:
        row = tf.ensure_shape(tf.io.decode_raw(tf.io.read_file(name), tf.float32), [5])
        return row[:4], row[4:]

    if pipeline == "ends":
        return dataset.repeat(2).map(read).shuffle(8, seed=1).batch(BATCH).prefetch(2)
    return dataset.map(read, 2).shuffle(8, seed=1).repeat().batch(BATCH).prefetch(2)


def main(folder: str, out: str, pipeline: str, *steps: str) -> None:
    # TensorFlow's modules are never garbage, so the collector need not look through them.
    gc.freeze()
    strategy = make_strategy()
    place = placement_of(strategy)
    base = Path(folder)
    # Each worker has a folder of its own, so that its opened files are counted separately.
    rows = base / f"rows-{place.workers}-{place.rank}"
    rows.mkdir()
    for row in range(ROWS):
        values = np.random.default_rng(row).standard_normal(5).astype(np.float32)
        (rows / f"{row}.bin").write_bytes(values.tobytes())
    with strategy.scope():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        prepare(model, seed=9)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    opened = Opened(rows)

    def fitted(checkpoints: Path, every_steps: int | None) -> dict[str, Any]:
        checkpoint = Checkpoint(checkpoints, every_steps=every_steps, every_s=None, keep=100)
        losses = Losses(checkpoint)
        length = None if pipeline == "ends" else STEPS
        data = dataset_of(rows, pipeline)
        model.fit(
            data, epochs=EPOCHS, steps_per_epoch=length, verbose=0, callbacks=[losses, checkpoint]
        )
        weights = [array.tolist() for array in model.get_weights()]
        return {"losses": losses.found, "weights": weights, "opened": opened.count()}

    found: dict[str, Any] = {}
    checkpoints = base / "checkpoints"
    if place.workers == 2:
        found["whole"] = fitted(checkpoints, 1)
    for step in steps:
        copy = base / f"from-{step}-{place.workers}"
        if place.is_chief:
            copy.mkdir()
            shutil.copy(checkpoints / f"step-{int(step):09d}.npz", copy)
        found[step] = fitted(copy, None)
    Path(out.replace("RANK", str(place.rank))).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

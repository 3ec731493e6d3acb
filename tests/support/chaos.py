"""A training program in which each fault of a schedule happens once, at a given step.

    python -m tests.support.chaos OUT.npz FOLDER 'EPOCH.STEP.WORKER.ACTION …'

It is a user's script with the `Checkpoint` callback, and the launcher runs it. A fault happens at
the end of STEP, which counts from 0 within the epoch. The STEP `v` is the first validation batch of
the epoch. The WORKER `*` means every worker. The actions are:

- kill, exit, raise, term, stop: this process gets SIGKILL, ends with exit code 3, raises an
  exception, gets SIGTERM, or gets SIGSTOP;
- lag, hang: a callback takes half a minute, or never returns;
- deadlock: this worker alone enters a collective;
- half: this process gets SIGKILL while it writes the next checkpoint;
- damage: some bytes of the newest checkpoint are changed, then this process gets SIGKILL;
- fill, free: the file system of the checkpoints is filled to the last byte, and emptied again.

TFMULTI_TEST_STEP_S in the environment makes each step last longer. The launcher passes it on over
SSH.

The chief writes weights, optimizer, history and the results of the validation to OUT.npz.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfmulti import Checkpoint, make_strategy, prepare
from tfmulti.distribution.strategies import placement_of
from tfmulti.training.checkpoint.file_format import Checkpoints

# An epoch has six steps, the last of seven rows.
EPOCHS, ROWS, BATCH = 3, 67, 12
EVERY_STEPS = 2


class Chaos(keras.callbacks.Callback):
    """Causes the faults of the schedule, each of them once in all attempts together."""

    def __init__(self, folder: Path, schedule: str, rank: int, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._folder, self._rank = folder, rank
        self._schedule = [tuple(entry.split(".")) for entry in schedule.split()]
        self._epoch = 0

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(float(os.environ.get("TFMULTI_TEST_STEP_S", "0")))
        self._at(str(batch))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            self._at("v")

    def _at(self, step: str) -> None:
        for number, (epoch, at, worker, action) in enumerate(self._schedule):
            if (int(epoch), at) == (self._epoch, step) and worker in ("*", str(self._rank)):
                mark = self._folder / f"done-{number}-{self._rank}"
                if not mark.exists():
                    mark.touch()
                    getattr(self, f"_{action}")()

    def _kill(self) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def _exit(self) -> NoReturn:
        os._exit(3)

    def _raise(self) -> NoReturn:
        raise RuntimeError("the data was on fire")

    def _term(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _lag(self) -> None:
        time.sleep(30)

    def _hang(self) -> None:
        time.sleep(1e6)

    def _deadlock(self) -> None:
        """Waits in a collective in which the other workers do not take part."""
        tf.raw_ops.CollectiveReduceV2(
            input=tf.ones(()),
            group_size=2,
            group_key=99_999,
            instance_key=1,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
        )

    def _half(self) -> None:
        def write(checkpoints: Checkpoints, record: Any) -> NoReturn:
            (checkpoints.folder / ".partial-1-step-000000099.npz").write_bytes(b"half of it")
            self._kill()

        Checkpoints.write = write  # type: ignore[method-assign,assignment]

    def _damage(self) -> None:
        # Otherwise a newer checkpoint may be completed afterwards.
        self._checkpoint.finish()
        newest = Checkpoints(self._folder / "checkpoints", keep=2).files()[0]
        data = bytearray(newest.read_bytes())
        for place in range(len(data) // 2, len(data) // 2 + 64):
            # Several bytes, because a few single bytes of the format are never read.
            data[place] ^= 1
        newest.write_bytes(data)
        self._kill()

    def _fill(self) -> None:
        with open(self._folder / "checkpoints" / "filler", "wb", buffering=0) as file:
            try:
                while file.write(b"x" * 512):
                    pass
            except OSError:
                pass

    def _free(self) -> None:
        (self._folder / "checkpoints" / "filler").unlink()


def main(out: str, folder: str, schedule: str = "") -> None:
    # TensorFlow's modules are never garbage, so the collector need not look through them.
    gc.freeze()
    strategy = make_strategy()
    place = placement_of(strategy)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, 8)).astype(np.float32)
    y = rng.integers(0, 3, ROWS)
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16, "relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(3, "softmax"),
            ]
        )
        prepare(model, seed=3)
        model.compile(
            keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"]
        )
    c = keras.callbacks
    checkpoint = Checkpoint(f"{folder}/checkpoints", every_steps=EVERY_STEPS, every_s=None)
    callbacks = [
        c.ReduceLROnPlateau("loss", patience=0, factor=0.5, min_delta=1.0),
        c.EarlyStopping("loss", patience=9, restore_best_weights=True),
        checkpoint,
        Chaos(Path(folder), schedule, place.rank, checkpoint),
    ]
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=EPOCHS,
        validation_data=(x[:20], y[:20]),
        callbacks=callbacks,
        verbose=2 if place.is_chief else 0,
    ).history
    if place.is_chief:
        left = {f"history/{name}": np.array(values) for name, values in history.items()}
        left |= {f"weight/{i}": weight for i, weight in enumerate(model.get_weights())}
        left |= {
            f"slot/{i}": keras.ops.convert_to_numpy(v)
            for i, v in enumerate(model.optimizer.variables)
        }
        np.savez(out, **left)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A user's own script that trains slowly, saves checkpoints, and writes its weights.

    python -m tests.support.slow_training FOLDER EPOCHS [wait]

Each step takes at least 20 ms, so that a test can stop the training midway on a fast machine. With
`wait`, each step after the fifth epoch takes half a second until the folder has a file `go`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

import keras
import numpy as np

import tfmulti

STEP_S, WAITING_STEP_S = 0.02, 0.5
STEPS = 20
ROWS = np.random.default_rng(1).normal(size=(STEPS * 8, 6)).astype(np.float32)
LABELS = np.arange(len(ROWS)) % 3


class Slow(keras.callbacks.Callback):
    """Makes each step slow, and writes the progress of the run after each epoch."""

    def __init__(self, progress: Path, go: Path | None) -> None:
        super().__init__()
        self._progress, self._go, self._epoch = progress, go, 0

    def get_state(self) -> dict[str, int]:
        """Returns an empty state, because the attributes belong to this process."""
        return {}

    def set_state(self, state: dict[str, int]) -> None:
        """Does nothing; see `get_state`."""

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        waits = self._go is not None and self._epoch >= 5 and not self._go.exists()
        time.sleep(WAITING_STEP_S if waits else STEP_S)

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        with self._progress.open("a") as file:
            file.write(f"{epoch + 1}\n")


def main(folder: Path, epochs: int, *, waits: bool = False) -> None:
    strategy = tfmulti.make_strategy()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3)]
        model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3, "softmax")])
        model = tfmulti.prepare(model, seed=5)
        model.compile("adam", "sparse_categorical_crossentropy")
    folder.mkdir(parents=True, exist_ok=True)
    resolver = strategy.cluster_resolver
    is_chief = resolver is None or resolver.task_id == 0
    checkpoint = tfmulti.Checkpoint(folder / "checkpoints", every_steps=STEPS)
    progress = folder / "progress.txt" if is_chief else Path("/dev/null")
    slow = Slow(progress, folder / "go" if waits else None)
    history = model.fit(
        ROWS, LABELS, batch_size=8, epochs=epochs, verbose=0, callbacks=[checkpoint, slow]
    )
    if is_chief:
        weights = b"".join(np.asarray(v).tobytes() for v in model.weights)
        found = {"weights": hashlib.sha256(weights).hexdigest(), "loss": history.history["loss"]}
        (folder / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), waits="wait" in sys.argv)

"""Measures how many seconds a checkpoint adds to a run.

    python -m benchmarks.checkpoints [--rounds 5]

The command trains models of two sizes on one device. Epochs with one checkpoint and epochs without
one run in turns. The medians go to benchmarks/results/checkpoints.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import result_files

SIZES = {"1 million parameters": 700, "25 million parameters": 3500}
BATCH, STEPS, DEFAULT_S = 32, 40, 60.0


def measure(units: int, rounds: int) -> dict[str, float]:
    """Returns the figures of one size."""
    import keras
    import numpy as np

    from tfmulti import Checkpoint, prepare

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((units,)), *(keras.layers.Dense(units, "relu") for _ in range(2))]
    )
    prepare(model, seed=0)
    model.compile("adam", "mse")
    x = np.zeros((BATCH * STEPS, units), np.float32)

    class OneCheckpoint(Checkpoint):
        """Makes one checkpoint in the middle of the epoch, and none at its end."""

        def wants(self, step: int, count: int) -> bool:
            return step == STEPS // 2

        def keep(self, record: Any, *, wait: bool) -> None:
            if not wait:
                super().keep(record, wait=False)

    def seconds(folder: str, checkpoint: bool) -> float:
        callbacks = [OneCheckpoint(folder, resume="auto")] if checkpoint else []
        started = time.perf_counter()
        model.fit(x, x, batch_size=BATCH, epochs=1, verbose=0, callbacks=callbacks)
        for callback in callbacks:
            callback.finish()
        return time.perf_counter() - started

    times = []
    with tempfile.TemporaryDirectory() as root:
        # The first epoch is traced.
        seconds(root + "/first", checkpoint=True)
        for number in range(rounds):
            times.append((seconds("", False), seconds(f"{root}/{number}", True)))
        size = next(Path(root, "0").iterdir()).stat().st_size
    added = statistics.median(with_it - without for without, with_it in times)
    return {
        "file_mb": round(size / 1e6, 1),
        "epoch_without_s": round(statistics.median(without for without, _ in times), 3),
        "added_s": round(added, 3),
        "percent_at_the_default_of_60_s": round(100 * added / DEFAULT_S, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    results = {
        "machine": result_files.MACHINE,
        "versions": result_files.versions(),
        "sizes": {name: measure(units, rounds) for name, units in SIZES.items()},
    }
    print(json.dumps(results, indent=1))
    result_files.write("checkpoints", results)


if __name__ == "__main__":
    main()

"""What a checkpoint costs a run: seconds that it adds, and their part of the default interval.

    python -m benchmarks.checkpoints [--rounds 5]

trains models of two sizes on one device, epochs with one checkpoint and epochs without in turns,
and writes the medians to benchmarks/results/checkpoints.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "checkpoints.json"
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
        """In the midst of the epoch; the one at its end is left out."""

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
        seconds(root + "/first", checkpoint=True)  # traces
        for number in range(rounds):
            times.append((seconds("", False), seconds(f"{root}/{number}", True)))
        size = next(Path(root, "0").iterdir()).stat().st_size
    added = statistics.median(with_it - without for without, with_it in times)
    return {
        "file_mb": round(size / 1e6, 1),
        "epoch_without_s": round(statistics.median(a for a, _ in times), 3),
        "added_s": round(added, 3),
        "percent_at_the_default_of_60_s": round(100 * added / DEFAULT_S, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    import keras
    import tensorflow as tf

    results = {
        "machine": f"{os.cpu_count()} cores, no GPU, {platform.machine()}",
        "versions": f"TensorFlow {tf.__version__}, Keras {keras.__version__}",
        "sizes": {name: measure(units, rounds) for name, units in SIZES.items()},
    }
    print(json.dumps(results, indent=1))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Measures what exactness costs: milliseconds of a step with and without each part of it.

    python -m benchmarks.exactness [--steps 60] [--rounds 7]

The command runs each pair on two replicas of one process and on two workers over loopback, the two
sides in turns. It writes the medians to benchmarks/results/exactness.json. The models are small, so
the time is mostly that of the measured part.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import result_files
from tfmulti.launch.addresses import reserved

PLACES = ("2 replicas", "2 workers")
FEATURES, CLASSES, UNITS, BATCH = 32, 10, 128, 64


def variants(strategy: Any) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Returns for each comparison two functions that make the models without and with the part.

    Sides that cannot run with this strategy (Keras alone on several workers) are left out.
    """
    import keras
    from keras import layers

    from tfmulti import prepare
    from tfmulti.distribution.strategies import placement_of

    def build(*middle: Callable[[], Any], prepared: Any = None, **compiled: Any) -> Any:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            inputs = x = keras.Input((FEATURES,))
            for _ in range(3):
                x = layers.Dense(UNITS, "relu")(x)
                for make in middle:
                    x = make()(x)
            model = keras.Model(inputs, layers.Dense(CLASSES, "softmax")(x))
            if prepared is not None:
                prepare(model, seed=0, **prepared)
            model.compile(
                keras.optimizers.SGD(0.01),
                compiled.get("loss", "sparse_categorical_crossentropy"),
                metrics=["accuracy"],
            )
        return model

    def norm(synchronized: bool) -> Callable[[], Any]:
        return lambda: layers.BatchNormalization(synchronized=synchronized)

    def augmented(of_all_rows: bool) -> Callable[[], Any]:
        class OfReplicaRows(layers.RandAugment):
            # This is Keras' own function.
            call = layers.RandAugment.call.__wrapped__

        kind = layers.RandAugment if of_all_rows else OfReplicaRows
        images = layers.Reshape((8, 16, 1))
        return lambda: keras.Sequential(
            [images, kind(value_range=(-3, 3), seed=1), layers.Flatten()]
        )

    def one_number(y_true: Any, y_pred: Any) -> Any:
        losses = keras.losses.sparse_categorical_crossentropy(y_true, y_pred)
        return keras.ops.mean(losses)

    by_weight = keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")
    pairs = {
        "sync_batch_norm, 3 layers (without: each replica's own)": (
            lambda: build(norm(False), prepared={"sync_batch_norm": False}),
            lambda: build(norm(False), prepared={}),
        ),
        "moving statistics averaged, 3 layers (without: LayerNormalization)": (
            lambda: build(layers.LayerNormalization, prepared={}),
            lambda: build(norm(False), prepared={"sync_batch_norm": False}),
        ),
        "a loss of one number from all rows (without: a value for each row)": (
            lambda: build(prepared={}),
            lambda: build(prepared={}, loss=one_number),
        ),
        "mean_with_sample_weight (without: a mean over rows)": (
            lambda: build(prepared={}),
            lambda: build(prepared={}, loss=by_weight),
        ),
        "dropout of one device, 3 layers (without: no dropout)": (
            lambda: build(prepared={}),
            lambda: build(lambda: layers.Dropout(0.3), prepared={}),
        ),
        "RandAugment of all rows, 3 layers (without: of each replica's)": (
            lambda: build(augmented(False), prepared={}),
            lambda: build(augmented(True), prepared={}),
        ),
        "microbatches 4 (without: 1)": (
            lambda: build(prepared={}),
            lambda: build(prepared={"microbatches": 4}),
        ),
    }
    if placement_of(strategy).workers == 1:
        pairs |= {
            "all of it (without: Keras alone)": (lambda: build(), lambda: build(prepared={})),
            "sync_batch_norm, 3 layers (without: Keras' synchronized=True)": (
                lambda: build(norm(True)),
                lambda: build(norm(True), prepared={}),
            ),
            "dropout of one device, 3 layers (without: Keras' own)": (
                lambda: build(lambda: layers.Dropout(0.3)),
                lambda: build(lambda: layers.Dropout(0.3), prepared={}),
            ),
        }
    return pairs


def measure(place: str, steps: int, rounds: int) -> dict[str, dict[str, float]]:
    """Returns the medians of each pair's rounds; runs in every worker."""
    import numpy as np
    import tensorflow as tf

    from tfmulti import make_strategy

    kind = "mirrored" if place == "2 replicas" else "multi_worker_mirrored"
    strategy = make_strategy(kind, replicas=2 if kind == "mirrored" else None)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((steps * BATCH, FEATURES)).astype(np.float32)
    y = rng.integers(CLASSES, size=len(x))
    weights = rng.uniform(0.5, 1.5, len(x)).astype(np.float32)
    options = tf.data.Options()
    # Otherwise the end of an epoch may wait for the tuner.
    options.autotune.enabled = False
    data = tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(BATCH, drop_remainder=True)
    data = data.with_options(options)

    def seconds(model: Any) -> float:
        started = time.perf_counter()
        model.fit(data, epochs=1, verbose=0)
        return time.perf_counter() - started

    medians = {}
    for name, pair in variants(strategy).items():
        models = [make() for make in pair]
        # The first epoch is traced and compiled.
        for model in models:
            seconds(model)
        times = [[seconds(model) / steps * 1000 for model in models] for _ in range(rounds)]
        without, with_it = (statistics.median(column) for column in zip(*times, strict=True))
        medians[name] = {
            "without_ms": round(without, 3),
            "with_ms": round(with_it, 3),
            "ratio": round(statistics.median(b / a for a, b in times), 3),
        }
        print(f"{place}  {name}: {medians[name]}", file=sys.stderr, flush=True)
    return medians


def run_place(place: str, steps: int, rounds: int) -> dict[str, dict[str, float]]:
    """Measures a place in new processes, one for each worker, and returns the chief's figures."""
    count = 1 if place == "2 replicas" else 2
    with tempfile.TemporaryDirectory() as folder, reserved(count) as addresses:
        cluster = {"worker": addresses}
        processes = []
        for index in range(count):
            env = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3")
            if count > 1:
                task = {"type": "worker", "index": index}
                env["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
            out = str(Path(folder) / f"{index}.json")
            argv = [sys.executable, "-m", "benchmarks.exactness", "--place", place, "--out", out]
            argv += ["--steps", str(steps), "--rounds", str(rounds)]
            quiet = {} if index == 0 else {"stderr": subprocess.DEVNULL}
            processes.append(subprocess.Popen(argv, env=env, **quiet))
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"{place}: exit codes {codes}")
        return json.loads((Path(folder) / "0.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--place", choices=PLACES, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.place:
        Path(args.out).write_text(json.dumps(measure(args.place, args.steps, args.rounds)))
        return
    results = {
        "machine": result_files.MACHINE,
        "versions": result_files.versions(),
        "model": f"3 × Dense({UNITS}), {BATCH} rows a batch; medians of {args.rounds} rounds",
        "places": {place: run_place(place, args.steps, args.rounds) for place in PLACES},
    }
    result_files.write("exactness", results)


if __name__ == "__main__":
    main()

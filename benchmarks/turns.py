"""Measures the milliseconds of a step of `fit` on one core, of Keras 3 and tfmulti in turns.

    python -m benchmarks.turns [--rounds 7] [--workloads mlp,cnn]

Separate processes (`benchmarks.compare`) differ by up to 8 % from run to run, because their memory
has other addresses. Here both sides run in one process. The command writes
benchmarks/results/turns.json and the table of docs/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys

from benchmarks import result_files, table
from benchmarks.peers.training_clock import StepClock
from benchmarks.workloads import WORKLOADS, compile_model, keras_model

SIDES = ("Keras 3", "tfmulti")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    args = parser.parse_args(arguments)
    # TensorFlow counts the cores when it is imported, so this comes first.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    step_ms = {}
    for name in args.workloads.split(","):
        step_ms[name] = measure(name, args.rounds)
        print(name, step_ms[name], flush=True)
    result_files.write("turns", result_files.read("turns") | step_ms)
    table.main()
    return 0


def measure(name: str, rounds: int) -> dict[str, float]:
    """Returns each side's median over the rounds, of medians over the steps of a call of `fit`."""
    import keras

    import tfmulti

    strategy = tfmulti.make_strategy("one_device")
    work = WORKLOADS[name]
    x, y = work.data()
    models = {}
    for side in SIDES:
        ours = side == "tfmulti"
        with strategy.scope() if ours else contextlib.nullcontext():
            model = keras_model(name, keras)
            if ours:
                tfmulti.prepare(model, seed=1)
            compile_model(model, keras)
        models[side] = model
    step_ms: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(rounds + 1):
        for side in SIDES[:: -1 if number % 2 else 1]:
            clock = StepClock(warm_up=2)
            callbacks = [clock.callback(keras)]
            models[side].fit(x, y, batch_size=work.batch, verbose=0, callbacks=callbacks)
            # The first round is traced.
            if number:
                step_ms[side].append(clock.figures()["step_ms"])
    return {side: round(statistics.median(values), 2) for side, values in step_ms.items()}


if __name__ == "__main__":
    sys.exit(main())

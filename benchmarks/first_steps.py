"""Measures the seconds to the end of the first step: plain Keras, two and three replicas in turns.

    python -m benchmarks.first_steps [--rounds 2] [--programs wgan_with_gradient_penalty,vae]

The programs are those of tests/programs, and EfficientNetV2B0. Each run is a new process. Three
times to the end of the first step are measured: from the start of the process, from the call of
`fit`, and the time of the cores since that call, which other processes of the machine hardly
change. The command prints a table of the medians, and writes benchmarks/results/first_steps.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import types

from benchmarks import result_files
from benchmarks.result_files import ROOT

PROGRAMS = (
    "wgan_with_gradient_penalty",
    "gan_with_trackers_made_by_compile",
    "captions_in_several_updates",
    "vq_vae_and_normalization",
    "miniature_gpt",
    "vae",
    "efficientnet_v2_b0",
)
SIDES = ("plain", "mirrored-2", "mirrored-3")
LIMIT_S = 180


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_steps")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    args = parser.parse_args(arguments)
    figures_of: dict[str, dict[str, list[dict[str, float]]]] = {}
    for number in range(args.rounds):
        for name in args.programs.split(","):
            for side in SIDES[:: -1 if number % 2 else 1]:
                figures = one_process(name, side)
                figures_of.setdefault(name, {}).setdefault(side, []).append(figures)
                print(number + 1, name, side, figures, flush=True)
    programs = {name: medians(sides) for name, sides in figures_of.items()}
    results = {"machine": result_files.MACHINE, "rounds": args.rounds, "programs": programs}
    result_files.write("first_steps", results)
    print(table(programs))


def one_process(name: str, side: str) -> dict[str, float]:
    """Returns the seconds to the end of the first step, from each of the starts."""
    argv = [sys.executable, "-m", "benchmarks.first_steps", "--child", name, side]
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    done = subprocess.run(
        argv, env=env, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    ended, first_step_s, first_step_core_s = map(float, done.stdout.split()[-3:])
    return {
        "from_start_s": round(ended - started, 2),
        "first_step_s": first_step_s,
        "first_step_core_s": first_step_core_s,
    }


def medians(sides: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Returns the medians of each side's rounds."""
    return {
        side: {key: round(statistics.median(f[key] for f in rounds), 2) for key in rounds[0]}
        for side, rounds in sides.items()
    }


def table(programs: dict[str, dict[str, dict[str, float]]]) -> str:
    """Returns a table in Markdown: seconds on the sides, and each side's multiple of the first.

    Args:
        programs: the medians by program and side.
    """
    lines = ["| program | from the start, s | from `fit`, s | from `fit`, s of a core |"]
    lines.append("|---|---|---|---|")
    for name, sides in programs.items():
        cells = []
        for key in ("from_start_s", "first_step_s", "first_step_core_s"):
            plain, *others = (sides[side][key] for side in SIDES)
            times = ", ".join(f"{other / plain:.1f}" for other in others)
            cells.append(f"{' → '.join(f'{s:.1f}' for s in (plain, *others))} ({times} times)")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def child(name: str, side: str) -> None:
    """Trains one program, and prints the seconds of its first step, by the clock and of cores."""
    import keras

    from tests.programs.catalogue import PROGRAMS as ALL
    from tests.support.cases import strategy_at
    from tfmulti import prepare

    keras.utils.set_random_seed(7)
    ended: list[tuple[float, float]] = []
    on_step = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ended.append(now())
    )
    with strategy_at(side).scope():
        program = ALL[name].make() if name in ALL else efficientnet()
        if side != "plain":
            prepare(program.model)
        program.model.compile(**program.compile)
    options = {**program.fit, "verbose": 0}
    options["callbacks"] = [*(options.get("callbacks") or []), on_step]
    called = now()
    program.model.fit(**options)
    # On Linux all processes have the same monotonic clock.
    print(
        ended[0][0], *(round(end - start, 2) for start, end in zip(called, ended[0], strict=True))
    )


def efficientnet() -> types.SimpleNamespace:
    """Returns EfficientNetV2B0 and its training, as a program has them."""
    import keras
    import numpy as np

    model = keras.applications.EfficientNetV2B0(weights=None, input_shape=(32, 32, 3), classes=10)
    x = np.random.default_rng(7).random((24, 32, 32, 3), np.float32)
    compiled = {"optimizer": "adam", "loss": "sparse_categorical_crossentropy"}
    fit = {"x": x, "y": np.arange(24) % 10, "batch_size": 12, "epochs": 1}
    return types.SimpleNamespace(model=model, compile=compiled, fit=fit)


def now() -> tuple[float, float]:
    """Returns the seconds of a clock, and those of all cores in this process."""
    return time.monotonic(), time.process_time()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()

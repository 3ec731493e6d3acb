"""Measures the seconds to the end of the first step, with plain Keras and on two replicas in turns.

    python -m benchmarks.first_steps [--rounds 2] [--programs wgan_with_gradient_penalty,vae]

The programs are those of tests/programs. Each run is a new process. Three times are measured. The
first one is that of the whole process, which makes the model and trains all epochs. The second one
is from the call of `fit` to the end of the first step. The third one is the time of the cores in
between, which other processes of the machine hardly change. The command prints a table of the
medians, and writes benchmarks/results/first_steps.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

from benchmarks import result_files
from benchmarks.result_files import ROOT

PROGRAMS = (
    "wgan_with_gradient_penalty",
    "gan_with_trackers_made_by_compile",
    "captions_in_several_updates",
    "vq_vae_and_normalization",
    "miniature_gpt",
    "vae",
)
SIDES = ("plain", "mirrored-2")
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
    """Returns the seconds of the whole process and of the first step, and the latter's of cores."""
    argv = [sys.executable, "-m", "benchmarks.first_steps", "--child", name, side]
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    done = subprocess.run(
        argv, env=env, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    whole = time.monotonic() - started
    first_step_s, first_step_core_s = map(float, done.stdout.split()[-2:])
    return {
        "process_s": round(whole, 2),
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
    """Returns a table in Markdown: seconds of plain Keras → of two replicas, and their quotient.

    Args:
        programs: the medians by program and side.
    """
    lines = ["| program | whole process, s | first step, s | first step, s of a core |"]
    lines.append("|---|---|---|---|")
    for name, sides in programs.items():
        cells = []
        for key in ("process_s", "first_step_s", "first_step_core_s"):
            plain, replicas = (sides[side][key] for side in SIDES)
            cells.append(f"{plain:.1f} → {replicas:.1f} ({replicas / plain:.1f} times)")
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
        program = ALL[name].make()
        if side != "plain":
            prepare(program.model)
        program.model.compile(**program.compile)
    options = {**program.fit, "verbose": 0}
    options["callbacks"] = [*(options.get("callbacks") or []), on_step]
    called = now()
    program.model.fit(**options)
    print(*(round(end - start, 2) for start, end in zip(called, ended[0], strict=True)))


def now() -> tuple[float, float]:
    """Returns the seconds of a clock, and those of all cores in this process."""
    return time.monotonic(), time.process_time()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()

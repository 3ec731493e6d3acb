"""Measures the seconds to the end of the first step: plain Keras, two and three replicas in turns.

    python -m benchmarks.first_steps [--rounds 2] [--programs wgan_with_gradient_penalty,vae]
    python -m benchmarks.first_steps --keras_io=PATH [--programs miniature_gpt] [--noverify]

The programs are those of tests/programs, and EfficientNetV2B0. With a checkout of keras-io they are
its programs (`tests.programs.public`). Each run is a new process. Three
times to the end of the first step are measured: from the start of the process, from the call of
`fit`, and the time of the cores since that call, which other processes of the machine hardly
change. The command prints a table of the medians, and writes benchmarks/results/first_steps.json.
With `--noverify` no program compares its first step with one device, and no file is written.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

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
    parser.add_argument("--programs", default="")
    parser.add_argument("--keras_io", type=Path, help="a checkout of keras-team/keras-io")
    parser.add_argument("--noverify", action="store_true", help="compare no step with one device")
    args = parser.parse_args(arguments)
    names = args.programs.split(",") if args.programs else PROGRAMS
    if args.keras_io is not None:
        names = public_programs(args.keras_io.resolve(), args.programs)
    figures_of: dict[str, dict[str, list[dict[str, float]]]] = {}
    for number in range(args.rounds):
        for name in names:
            for side in SIDES[:: -1 if number % 2 else 1]:
                figures = one_process(name, side, *["--noverify"] * args.noverify)
                if figures is None:
                    # A program that needs a download, or that tfmulti refuses.
                    print(number + 1, name, side, "no step", flush=True)
                    break
                figures_of.setdefault(name, {}).setdefault(side, []).append(figures)
                print(number + 1, name, side, figures, flush=True)
    programs = {
        Path(name).stem: medians(sides)
        for name, sides in figures_of.items()
        if len(sides) == len(SIDES)
    }
    results = {"machine": result_files.MACHINE, "rounds": args.rounds, "programs": programs}
    if not args.noverify:
        kind = "first_steps" if args.keras_io is None else "first_steps_public"
        result_files.write(kind, results)
    print(table(programs))


def public_programs(checkout: Path, names: str) -> list[str]:
    """Returns the files of a checkout's programs, all or those of some names joined by commas."""
    from tests.programs.public_programs import PUBLIC

    chosen = {name: checkout / path for name, (_, path) in PUBLIC.items()}
    wanted = names.split(",") if names else list(chosen)
    unknown = [name for name in wanted if name not in chosen]
    if unknown:
        print(f"no program {unknown[0]!r}; tests/programs/public_programs.py lists them")
        sys.exit(2)
    return list(dict.fromkeys(str(chosen[n]) for n in wanted if chosen[n].exists()))


def one_process(name: str, side: str, *options: str) -> dict[str, float] | None:
    """Returns the seconds to the end of the first step, from each of the starts.

    Args:
        name: a program of tests/programs, or the file of a public program.
        side: `plain`, or a place such as `mirrored-2`.
        options: `--noverify`, or nothing.

    Returns:
        The seconds by name; None if a public program takes no step.
    """
    argv = [sys.executable, "-m", "benchmarks.first_steps", "--child", name, side, *options]
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    is_public = name.endswith(".py")
    try:
        done = subprocess.run(
            argv,
            env=env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=not is_public,
        )
    except subprocess.TimeoutExpired:
        return None
    if is_public and (done.returncode or not done.stdout.strip()):
        return None
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


def child(name: str, side: str, *options: str) -> None:
    """Trains one program, and prints the seconds of its first step, by the clock and of cores."""
    import keras

    from tests.programs.catalogue import PROGRAMS as ALL
    from tests.support.cases import strategy_at
    from tfmulti import prepare

    keras.utils.set_random_seed(7)
    prepared: dict[str, Any] = {"verify": False} if "--noverify" in options else {}
    if name.endswith(".py"):
        public_child(Path(name), side, prepared)
        return
    ended: list[tuple[float, float]] = []
    on_step = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ended.append(now())
    )
    if name in ALL:
        keras.config.set_floatx(ALL[name].floatx)
    with strategy_at(side).scope():
        program = ALL[name].make() if name in ALL else efficientnet()
        if side != "plain":
            prepare(program.model, **prepared)
        program.model.compile(**program.compile)
    given = {**program.fit, "verbose": 0}
    given["callbacks"] = [*(given.get("callbacks") or []), on_step]
    called = now()
    program.model.fit(**given)
    report(called, ended[0])


def public_child(file: Path, side: str, prepared: dict[str, Any]) -> None:
    """Runs a public program to the end of its first step, and prints the seconds of the step."""
    import keras

    from tests.programs import public

    times: list[tuple[float, float]] = []

    def on_fit() -> keras.callbacks.Callback:
        times.append(now())
        return keras.callbacks.LambdaCallback(on_train_batch_end=on_step)

    def on_step(batch: int, logs: object) -> None:
        times.append(now())
        raise public.Enough

    public.run_to_first_step(file, side, on_fit, **prepared)
    # The last line, since a program may print, too.
    print()
    report(times[0], times[1])


def report(called: tuple[float, float], ended: tuple[float, float]) -> None:
    """Prints when the first step ended, and its seconds by the clock and of cores."""
    # On Linux all processes have the same monotonic clock.
    print(ended[0], *(round(end - start, 2) for start, end in zip(called, ended, strict=True)))


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

"""Compares random programs with plain Keras, to find differences that no message tells.

    python -m tests.programs.search PLACE FIRST COUNT [--compile=JSON] [--prepare=JSON]
        [--floatx=TYPE]

PLACE is `one_device`, `mirrored-N` or `workers-N` (with TF_CONFIG). The programs are those of the
seeds from FIRST on (`random_programs`). `--compile` has more arguments of `compile`, and
`--prepare` has options of `prepare`, such as '{"microbatches": 2}'. `--floatx` is the type of the
numbers: float64, or float32, with which small errors hide in the rounding. Each program prints a
line with its seed, a verdict of `judged`, and a reason. At the end the programs that differ, or
that plain Keras alone runs, are printed once more with their parts, on stderr. The exit code is 1
if there are any.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import warnings
from dataclasses import replace
from typing import Any

import tensorflow as tf

from tests.programs import random_programs
from tests.programs.__main__ import attempt
from tests.programs.registry import Made
from tests.programs.running import Left, differences, excess
from tests.support.cases import strategy_at
from tfmulti import errors

EQUAL, SENSITIVE, REFUSED, TOLD = "equal", "sensitive", "refused", "told"
DIFFERS, FAILS, FAILS_IN_KERAS = "DIFFERS", "FAILS", "fails in plain Keras, too"


def judged(
    plain: Left, found: Left, perturbed: Left, told: list[str], tolerance: float
) -> tuple[str, str]:
    """Returns a verdict about a program, and its reason.

    Args:
        plain: the results of plain Keras.
        found: the results at another place.
        perturbed: the results of plain Keras after a change of the initial weights by one unit in
            the last place.
        told: the warnings that plain Keras did not give.
        tolerance: the largest difference that needs no reason.
    """
    if "error" in plain:
        return FAILS_IN_KERAS, ": ".join(plain["error"])
    if "error" in found:
        is_refused = hasattr(errors, str(found["error"][0]))
        return REFUSED if is_refused else FAILS, ": ".join(found["error"])
    largest = max(differences(found, plain).values())
    if largest <= tolerance:
        return EQUAL, f"{largest:.0e}"
    if plain.keys() != perturbed.keys():
        return SENSITIVE, "rounding decides which results there are"
    ratio, words = excess(found, plain, [perturbed], tolerance)
    if ratio <= 1:
        return SENSITIVE, words
    return (TOLD, f"{words}; {told[0]}") if told else (DIFFERS, words)


def messages(caught: list[warnings.WarningMessage]) -> list[str]:
    """Returns the warnings for users; a library's warning for programmers tells no difference."""
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


def compared(
    strategy: tf.distribute.Strategy,
    seed: int,
    compiled: dict[str, Any],
    options: dict[str, Any],
    float_type: str,
) -> tuple[str, str, list[str]]:
    """Runs the program of a seed, and returns the verdict, its reason and the program's parts."""
    words: list[str] = []
    # XLA draws other random numbers, which `fit` tells.
    by_keras = {**compiled, "jit_compile": False} if compiled.get("jit_compile") else compiled
    program = random_programs.program_of(seed, words, float_type, **by_keras)
    alone = tf.distribute.get_strategy()
    with warnings.catch_warnings(record=True) as of_keras:
        warnings.simplefilter("always")
        plain = attempt(program, alone, plain=True)

    def make() -> Made:
        return replace(random_programs.made(seed, **compiled), prepare=options)

    with warnings.catch_warnings(record=True) as of_tfmulti:
        warnings.simplefilter("always")
        found = attempt(replace(program, make=make), strategy, plain=False)
    known = set(messages(of_keras))
    told = [message for message in messages(of_tfmulti) if message not in known]
    perturbed = plain
    if "error" not in plain and "error" not in found:
        perturbed = attempt(program, alone, plain=True, perturbed=True)
    return *judged(plain, found, perturbed, told, program.tolerance), words


def main(argv: list[str]) -> str | None:
    parser = argparse.ArgumentParser()
    parser.add_argument("place")
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--compile", type=json.loads, default={})
    parser.add_argument("--prepare", type=json.loads, default={})
    parser.add_argument("--floatx", choices=list(random_programs.TOLERANCES), default="float64")
    given = parser.parse_args(argv)
    # Keras collects garbage before each program. The imported modules are never garbage.
    gc.freeze()
    strategy = strategy_at(given.place)
    new = []
    for seed in range(given.first, given.first + given.count):
        verdict, reason, words = compared(
            strategy, seed, given.compile, given.prepare, given.floatx
        )
        line = f"{seed}: {verdict}: {' '.join(reason.split())}"
        print(line, flush=True)
        if verdict in (DIFFERS, FAILS):
            new.append(f"{line} [{', '.join(words)}]")
    return "\n".join(new) or None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

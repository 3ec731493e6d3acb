"""Runs the programs of one place in one process, and writes their results.

    python -m tests.programs OUT PLACE 'NAME|NAME|…'

`OUT` is a folder; PLACE is `plain` (Keras alone, without tfmulti), `mirrored-N` or `workers-N`
(with TF_CONFIG). The results of a program are in `OUT/rank_R/NAME.npz`: weights, optimizer slots,
history, evaluation and predictions, or the class and the message of its error. At the place
`plain` each program runs twice. The second time its initial weights are moved by one unit in the
last place, and the results are in `OUT/rank_1`. A program that is expected to be refused runs
once. A program that takes longer than `LIMIT_S` ends the process, with the stacks of its threads
on stderr.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.programs.catalogue import PROGRAMS
from tests.programs.registry import EQUAL, Made, Program
from tests.support.cases import strategy_at
from tfmulti import prepare
from tfmulti.distribution.strategies import placement_of
from tfmulti.keras_patches.variables import array_of

LIMIT_S = 180
SEED = 7


def nudged(next_creator: Callable[..., Any], draw: int = 0, **options: Any) -> Any:
    """Makes a variable as TensorFlow does, but moves trainable floats by one unit.

    Half of the elements are moved up and half down, as drawn from the variable's size and `draw`.
    """
    if not options.get("trainable"):
        return next_creator(**options)
    # A variable may be made while a step is traced.
    with tf.init_scope():
        value = options["initial_value"]
        given = array_of(value() if callable(value) else value)
    value = given
    if given.dtype in (np.float32, np.float64):
        up = np.random.default_rng(given.size + draw).random(given.shape) < 0.5
        moved = np.nextafter(given, np.where(up, np.inf, -np.inf).astype(given.dtype))
        # The number next to 0 is so small that it would not change the results.
        value = np.where(given == 0, given, moved)
    return next_creator(**{**options, "initial_value": value})


def run(
    program: Program, strategy: tf.distribute.Strategy, plain: bool, perturbed: bool
) -> dict[str, Any]:
    """Runs a program, and returns its results as arrays by name."""
    # This also removes the creators of variables.
    keras.utils.clear_session()
    keras.config.set_floatx(program.floatx)
    keras.utils.set_random_seed(SEED)
    try:
        with tf.variable_creator_scope(nudged) if perturbed else contextlib.nullcontext():
            with strategy.scope():
                made = program.make()
                if not plain:
                    prepare(made.model, **made.prepare)
                made.model.compile(**made.compile)
            return _left_by(made, program.apart)
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


def _left_by(made: Made, apart: tuple[str, ...]) -> dict[str, Any]:
    model = made.model
    left: dict[str, Any] = {}
    if made.use is not None:
        left |= {f"use/{key}": value for key, value in made.use(model).items()}
    else:
        history = model.fit(**made.fit, verbose=0).history
        left |= _by_place("history", history)
    left |= {f"weight/{i}": array_of(w.value) for i, w in enumerate(model.weights)}
    for name, optimizer in _optimizers(made).items():
        if not (optimizer.built and int(optimizer.iterations.numpy())):
            # This is the default of `compile`, which the step does not use.
            continue
        for i, variable in enumerate(optimizer.variables):
            kind = variable.name.rpartition("_")[2]
            left[f"slot/{name}/{kind}/{i}"] = array_of(variable.value)
    if made.after is not None:
        left |= {f"after/{key}": value for key, value in made.after(model).items()}
    if made.evaluate is not None:
        found = model.evaluate(**made.evaluate, verbose=0, return_dict=True)
        left |= _by_place("evaluate", found)
    if made.predict is not None:
        outputs = keras.tree.flatten(model.predict(**made.predict, verbose=0))
        left |= {f"predict/{i}": output for i, output in enumerate(outputs)}
    return {key: _storable(value) for key, value in left.items() if not key.startswith(apart)}


def _by_place(kind: str, logs: dict[str, Any]) -> dict[str, Any]:
    """Returns logs by a name that tells their place, so that their order is compared, too."""
    return {f"{kind}/{key}, number {i}": value for i, (key, value) in enumerate(logs.items())}


def _storable(value: Any) -> np.ndarray:
    """Returns a result as an array that NumPy's files can hold. They have no bfloat16."""
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _optimizers(made: Made) -> dict[str, keras.optimizers.Optimizer]:
    held = {
        name: thing
        for name, thing in sorted(vars(made.model).items())
        if isinstance(thing, keras.optimizers.Optimizer)
    }
    return {**held, **made.optimizers}


def attempt(
    program: Program, strategy: tf.distribute.Strategy, plain: bool, perturbed: bool = False
) -> dict[str, Any]:
    """Returns the results of a program, or the class and the message of its error."""
    try:
        return run(program, strategy, plain, perturbed)
    except Exception as error:
        return {"error": np.array([type(error).__name__, str(error)])}


def main(out: str, place: str, names: str) -> None:
    # Keras collects garbage before each program. The imported modules are never garbage.
    gc.freeze()
    strategy = strategy_at(place)
    plain = place == "plain"
    folder = Path(out) / f"rank_{0 if plain else placement_of(strategy).rank}"
    for name in names.split("|"):
        started, before = time.perf_counter(), time.process_time()
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        left = attempt(PROGRAMS[name], strategy, plain)
        _keep(folder, name, left)
        if plain:
            if PROGRAMS[name].expects == EQUAL:
                left = attempt(PROGRAMS[name], strategy, plain, perturbed=True)
            _keep(Path(out) / "rank_1", name, left)
        faulthandler.cancel_dump_traceback_later()
        seconds, busy = time.perf_counter() - started, time.process_time() - before
        print(f"{seconds:6.2f} s, {busy:6.2f} s of a core  {name}", flush=True)


def _keep(folder: Path, name: str, left: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"{name}.npz", **left)


if __name__ == "__main__":
    main(*sys.argv[1:])

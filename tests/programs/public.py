"""Runs public programs from a checkout of their repositories, and prints a table.

    python -m tests.programs.public --keras_io=PATH [--tensorflow_docs=PATH] [--only=NAME,…]

Each program is run unmodified, by plain Keras on one device and by tfmulti at each of `--places`.
What it downloads is replaced by synthetic data of the same form (`synthetic`), its data and epochs
are cut short, arrays keep their order, and `fit`, `evaluate` and `predict` of its models are those
of a prepared model. After each `fit` weights, optimizer slots and history are compared. The table
says `equal` within a difference, `differs` by what, `refused` with the message, or why the program
cannot run here. `--table=FILE` writes it in Markdown. Only what `public_programs` lists is changed:
constants, so that large programs run in minutes, and the generator of random numbers. With
`--floatx=float64` programs compute in that type, in which rounding explains much less.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import json
import os
import re
import runpy
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.programs.public_programs import ALONE, BY_KERAS, CONSTANTS, FITS, PUBLIC
from tests.support.processes import ONE_THREAD, processes, run_workers

if TYPE_CHECKING:
    import keras

PLACES = ("mirrored-2", "mirrored-3", "workers-2")
LIMIT_S = 900  # of one program at one place
EPOCHS = 2
USUAL_FITS = 2  # calls of `fit` that are compared; the program ends after them
USES = 3  # calls of `evaluate` and `predict`, after which it ends, too
TOLERANCES = {"float32": 1e-6, "float64": 1e-14}
PERTURBATIONS = 4  # of the initial weights at most, where one does not explain a difference


class Enough(BaseException):
    """Ends a program whose calls of `fit` have all been seen."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keras_io", type=Path, help="a checkout of keras-team/keras-io")
    parser.add_argument("--tensorflow_docs", type=Path, help="a checkout of tensorflow/docs")
    parser.add_argument("--only", default="", help="names of programs, joined by commas")
    parser.add_argument("--places", default=",".join(PLACES))
    parser.add_argument("--limit_s", type=int, default=LIMIT_S, help="of one program at one place")
    parser.add_argument("--floatx", choices=TOLERANCES, default="float32")
    parser.add_argument("--out", type=Path, help="a folder for what programs left; kept")
    parser.add_argument("--table", type=Path, help="a file for the table in Markdown")
    options = parser.parse_args(argv)
    roots = {"keras_io": options.keras_io, "tensorflow_docs": options.tensorflow_docs}
    places = options.places.split(",")
    out = options.out or Path(tempfile.mkdtemp(prefix="public-programs-"))
    rows = []
    for name, (root, path) in PUBLIC.items():
        if roots[root] is None or (options.only and name not in options.only.split(",")):
            continue
        file = (roots[root] / path).resolve()
        rows.append([name, *verdicts(name, file, places, out, options.limit_s, options.floatx)])
        print(" | ".join(rows[-1]), flush=True)
        if options.table:
            heads = ["program", *places]
            lines = [heads, ["---"] * len(heads), *([in_short(cell) for cell in r] for r in rows)]
            options.table.write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))


def verdicts(
    name: str,
    file: Path,
    places: Sequence[str],
    out: Path,
    limit_s: int,
    floatx: str = "float32",
) -> list[str]:
    """Returns what the table says of a program at each place."""
    from tests.programs.running import excess

    if not file.exists():
        return ["cannot run here: not in this checkout"] * len(places)

    tolerance = TOLERANCES[floatx]
    program = _changed(name, file, out / name, floatx)

    def left_at(place: str) -> dict[str, np.ndarray]:
        return _run(program, place, out / name / place, limit_s, floatx)

    def alone(place: str) -> dict[str, np.ndarray]:
        left = left_at(place)
        left.pop("stopped", None)  # by an error of what comes after the calls of `fit`
        return left

    plain = alone("plain")
    if "error" in plain:
        return [f"cannot run here: {_line(plain['error'])}"] * len(places)
    perturbed = [alone("perturbed-0")]
    words = []
    for place in places:
        left = left_at(place)
        if "error" in left:
            words.append(f"refused: {_line(left['error'])}")
            continue
        stopped = left.pop("stopped", None)
        if stopped is not None and left.keys() != plain.keys():  # and plain Keras went on
            words.append(f"refused: {_line(stopped)}")
            continue
        if perturbed[0].keys() != plain.keys():  # as when it stops early
            words.append("cannot be compared: another number of epochs when perturbed")
            continue
        ratio, what = excess(left, plain, perturbed, tolerance)
        while ratio > 1 and len(perturbed) < PERTURBATIONS:
            perturbed.append(alone(f"perturbed-{len(perturbed)}"))
            ratio, what = excess(left, plain, perturbed, tolerance)
        words.append(f"equal ({what})" if ratio <= 1 else what)
    return words


def in_short(words: str) -> str:
    """Returns a verdict with rounded numbers, and without the name of the array.

    Args:
        words: a verdict of `verdicts`.
    """

    def rounded(number: str) -> str:
        mantissa, _, exponent = f"{float(number):.0e}".partition("e")
        return f"{mantissa}e{int(exponent):+}".replace("e+0", "") if exponent else mantissa

    def of(found: re.Match[str]) -> str:
        difference, allowed = rounded(found[1]), rounded(found[2])
        is_usual = found[0].startswith("(") and float(found[2]) in TOLERANCES.values()
        short = difference if is_usual else f"{difference}; {allowed} allowed"
        return f"({short})" if found[0].startswith("(") else short

    return re.sub(r"\(?\S+ differs by (\S+), allowed ([^\s)]+)\)?", of, words)


def _line(error: np.ndarray) -> str:
    kind, message = (str(part) for part in error)
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    return f"{kind}: {lines[-1] if lines else ''}".replace("|", "/")[:200]


def _run(file: Path, place: str, folder: Path, limit_s: int, floatx: str) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "left_RANK.npz"
    argv = ["-m", "tests.programs.public", "--child", str(file), place, str(target), floatx]
    kind, _, count = place.partition("-")
    env = {**ONE_THREAD, "MPLBACKEND": "Agg", "KERAS_BACKEND": "tensorflow"}
    try:
        if kind == "workers":
            run_workers(argv, int(count), folder / "logs", limit_s=limit_s, env=env)
        else:
            with processes(folder / "logs") as group:
                group.start(argv, env)
                if group.wait(limit_s)[0].returncode:
                    raise AssertionError(group.errors(0))
    except AssertionError as error:
        late = "still running" in str(error).splitlines()[0]
        return {"error": np.array(["Died", f"over {limit_s} s" if late else str(error)[-2000:]])}
    with np.load(str(target).replace("RANK", "0")) as archive:
        return {name: archive[name] for name in archive.files}


def child(file: str, place: str, target: str, floatx: str = "float32") -> None:
    """Runs one program at one place in this process."""
    import keras
    import tensorflow as tf

    from tests.programs.__main__ import SEED, nudged
    from tests.support.cases import strategy_at
    from tfmulti.distribution.strategies import placement_of

    kind, _, draw = place.partition("-")
    plain = kind in ("plain", "perturbed")
    strategy = strategy_at("plain" if plain else place)
    left: dict[str, Any] = {}
    keras.config.set_floatx(floatx)
    keras.utils.set_random_seed(SEED)
    perturb = functools.partial(nudged, draw=int(draw or 0))
    creators = tf.variable_creator_scope(perturb) if kind == "perturbed" else None
    rank = 0 if plain else placement_of(strategy).rank
    target = os.path.abspath(target.replace("RANK", str(rank)))
    # All workers share the files, as on a shared disk.
    files = Path(target).parent / "files"
    if Path(file).stem in ALONE:
        files = Path(target).with_suffix("")
    with _stand_ins(files, floatx) as folder:
        _watch(plain, left, FITS.get(Path(file).stem, USUAL_FITS))
        try:
            with creators or contextlib.nullcontext(), strategy.scope():
                _execute(Path(file), folder)
        except Enough:
            pass
        except BaseException as error:
            traceback.print_exc()
            stopped = np.array([type(error).__name__, str(error)])
            is_lost = not left or isinstance(error, tf.errors.OpError)
            left = {"error": stopped} if is_lost else {**left, "stopped": stopped}
        if not left:
            left = {"error": np.array(["NoFit", "the program calls fit nowhere"])}
    np.savez(target, **left)


def run_to_first_step(
    file: Path, place: str, on_fit: Callable[[], keras.callbacks.Callback], **prepared: Any
) -> None:
    """Runs a program in this process until its first training step has ended.

    Args:
        file: the program.
        place: `plain`, or a place such as `mirrored-2`.
        on_fit: is called when `fit` is, and returns a callback that raises `Enough` after a step.
        prepared: arguments of `prepare`.
    """
    from tests.support.cases import strategy_at

    strategy = strategy_at(place)
    with tempfile.TemporaryDirectory() as files, _stand_ins(Path(files), "float32") as folder:
        _watch(place == "plain", {}, 1, on_fit, **prepared)
        with contextlib.suppress(Enough), strategy.scope():
            program = _changed(file.stem, file, folder, "float32")
            _execute(program, folder)


@contextlib.contextmanager
def _stand_ins(files: Path, floatx: str) -> Iterator[Path]:
    """Lets programs write to a folder, and read what stands for downloads. Yields a free folder."""
    from tests.programs import synthetic

    files.mkdir(exist_ok=True)
    os.chdir(files)
    with tempfile.TemporaryDirectory() as folder:
        synthetic.install(Path(folder))
        synthetic.give_floats_of(floatx)
        yield Path(folder)


def _execute(file: Path, folder: Path) -> None:
    if file.suffix == ".py":
        runpy.run_path(str(file), run_name="__main__")
        return
    cells = json.loads(file.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    script = folder / "notebook.py"
    script.write_text("\n".join(_without_magic(source) for source in sources))
    runpy.run_path(str(script), run_name="__main__")


def _changed(name: str, file: Path, folder: Path, floatx: str) -> Path:
    """Writes a program with its listed changes, and returns its path."""
    if file.suffix != ".py":
        return file
    source = file.read_text()
    if name.endswith(BY_KERAS):
        source = re.sub(r"\btf\.random\.(normal|uniform)\(", r"keras.random.\1(", source)
    source = source.replace("float32", floatx)
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / file.name
    program.write_text(with_constants(source, CONSTANTS.get(file.stem, {})))
    return program


def with_constants(source: str, constants: Mapping[str, object]) -> str:
    """Returns a program in which statements such as `batch_size = 64` assign other values.

    Args:
        source: the program.
        constants: name -> value.
    """
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)) if constants else ():
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) if name in constants:
                statement = f"{' ' * node.col_offset}{name} = {constants[name]!r}"
                rest = [""] * ((node.end_lineno or node.lineno) - node.lineno)
                lines[node.lineno - 1 : node.end_lineno] = [statement, *rest]
    return "\n".join(lines) + "\n"


def _without_magic(source: str) -> str:
    lines = [line for line in source.splitlines() if not line.lstrip().startswith(("!", "%"))]
    return "\n".join(lines)


def _watch(
    plain: bool,
    left: dict[str, Any],
    fits_to_see: int,
    on_fit: Callable[[], keras.callbacks.Callback] | None = None,
    **prepared: Any,
) -> None:
    """Makes `fit` short and of a prepared model, and notes what it leaves."""
    import keras

    from tests.programs import synthetic
    from tfmulti import prepare
    from tfmulti.training.distributed_model import DistributedModel

    fits: list[Any] = []
    uses: list[str] = []
    inside: list[str] = []
    synthetic.shorten_datasets(lambda: bool(inside))

    def wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(model: Any, *args: Any, **options: Any) -> Any:
            if inside:
                return original(model, *args, **options)
            with _noted(inside, name):
                if not plain:
                    prepare(model, **prepared)
                method = getattr(model, name)
                if name != "fit":
                    uses.append(name)
                    if fits and len(uses) > USES:
                        raise Enough
                    return method(*args, **options)
                given = _shortened(original, model, args, options)
                if on_fit is not None:
                    callbacks = keras.tree.flatten(given.get("callbacks") or [])
                    given["callbacks"] = [*callbacks, on_fit()]
                result = method(**given)
                left.update(_left_by(model, result, len(fits)))
                fits.append(model)
                if len(fits) == fits_to_see:
                    raise Enough
                return result

        return call

    for owner in (keras.Model, DistributedModel):  # whatever is fitted twice is prepared by then
        for name in ("fit", "evaluate", "predict"):
            setattr(owner, name, wrapped(name, getattr(owner, name)))


@contextlib.contextmanager
def _noted(inside: list[str], name: str) -> Iterator[None]:
    inside.append(name)
    try:
        yield
    finally:
        inside.pop()


def _shortened(original: Any, model: Any, args: Any, options: dict[str, Any]) -> dict[str, Any]:
    import inspect

    import keras

    from tests.programs import synthetic

    given = inspect.signature(original).bind(model, *args, **options).arguments
    del given["self"]
    given["epochs"] = given.get("initial_epoch", 0) + min(given.get("epochs", 1), EPOCHS)
    given |= {"verbose": 0, "shuffle": False}
    for name in ("x", "y", "sample_weight", "validation_data"):
        if name in given:
            given[name] = synthetic.cut(given[name])
    if given.get("batch_size"):
        given["batch_size"] = min(given["batch_size"], synthetic.BATCH)
    if not model.built:
        # Keras 3 does not save such a model.
        given["callbacks"] = [
            callback
            for callback in keras.tree.flatten(given.get("callbacks") or [])
            if not isinstance(callback, keras.callbacks.ModelCheckpoint)
        ]
    for name in ("steps_per_epoch", "validation_steps"):
        if given.get(name):
            given[name] = min(given[name], synthetic.STEPS)
    return given


def _left_by(model: Any, history: Any, number: int) -> dict[str, Any]:
    import keras

    left = {f"fit_{number}/history/{k}": np.asarray(v) for k, v in history.history.items()}
    for i, weight in enumerate(model.weights):
        left[f"fit_{number}/weight/{i}"] = keras.ops.convert_to_numpy(weight)
    for name, optimizer in sorted(vars(model).items()):
        if not isinstance(optimizer, keras.optimizers.Optimizer) or not optimizer.built:
            continue
        # Keras builds an optimizer that makes no steps in some calls, and in others not.
        if not int(keras.ops.convert_to_numpy(optimizer.iterations)):
            continue
        for i, variable in enumerate(optimizer.variables):
            kind = variable.name.rpartition("_")[2]
            value = keras.ops.convert_to_numpy(variable)
            left[f"fit_{number}/slot/{name}/{kind}/{i}"] = value
    return {name: value for name, value in left.items() if value.dtype.kind in "fiub"}


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()

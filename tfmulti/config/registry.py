"""The names that flags take, and where each one's code is.

One line here and one file add a model, a data set or an optimizer. The places are text
(`package.module:function`), so that a mistyped name is answered without importing
TensorFlow.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfmulti.errors import ConfigError, UserError, did_you_mean


@dataclass(frozen=True)
class ModelEntry:
    """A model's place, and the data that it takes.

    Attributes:
        place: the function that builds it.
        takes: the kinds of data that it takes (`DataSpec.kind`); empty for any kind.
        example_data: the options of `synthetic` data of the form that it was made for.
        learning_rate: its default, where the default of the data set would not train it.
    """

    place: str
    takes: tuple[str, ...] = ()
    example_data: str = ""
    learning_rate: float | None = None


_GRAY, _COLOR = "shape=28x28x1", "shape=32x32x3"
MODELS: dict[str, ModelEntry] = {
    "linear": ModelEntry("tfmulti.run.models.dense:linear", ("image", "vector"), _GRAY),
    "mlp": ModelEntry("tfmulti.run.models.dense:mlp", ("image", "vector"), _GRAY),
    "lenet": ModelEntry("tfmulti.run.models.convolutional:lenet", ("image",), _GRAY),
    "cnn": ModelEntry("tfmulti.run.models.convolutional:cnn", ("image",), _GRAY),
    "resnet20": ModelEntry("tfmulti.run.models.resnet:resnet20", ("image",), _COLOR),
    "resnet50": ModelEntry("tfmulti.run.models.resnet:resnet50", ("image",), "shape=224x224x3"),
    "vit": ModelEntry("tfmulti.run.models.transformer:vit", ("image",), _COLOR, 0.0005),
    "transformer": ModelEntry(
        "tfmulti.run.models.transformer:text_classifier",
        ("tokens",),
        "tokens=128,vocabulary=20000",
        0.0005,
    ),
}

OPTIMIZERS: dict[str, str] = {
    "sgd": "tfmulti.run.optimizers:sgd",
    "adam": "tfmulti.run.optimizers:adam",
    "adamw": "tfmulti.run.optimizers:adamw",
    "lamb": "tfmulti.run.optimizers:lamb",
    "adafactor": "tfmulti.run.optimizers:adafactor",
    "lion": "tfmulti.run.optimizers:lion",
    "muon": "tfmulti.run.optimizers:muon",
}


@dataclass(frozen=True)
class Recipe:
    """A data set's place, and what a run on it uses where no flag says otherwise.

    `skips_damage`: its loader is told `skip_bad_records`, since it looks through files itself.
    """

    place: str
    model: str
    global_batch_size: int | None = None  # None: the user must give one
    epochs: int = 10
    steps_per_epoch: int | None = None  # None: each example once an epoch
    optimizer: str = "adam"
    learning_rate: float = 0.001
    takes_options: bool = False
    skips_damage: bool = False


DATASETS: dict[str, Recipe] = {
    "digits": Recipe("tfmulti.data.sources.digits:load", "cnn", 64, epochs=15, learning_rate=0.003),
    "synthetic": Recipe("tfmulti.data.sources.synthetic:load", "cnn", 64, takes_options=True),
    "regression": Recipe(
        "tfmulti.data.sources.regression:load", "mlp", 16, steps_per_epoch=10, learning_rate=0.01
    ),
    "mnist": Recipe("tfmulti.data.sources.keras_datasets:mnist", "cnn", 128),
    "fashion_mnist": Recipe("tfmulti.data.sources.keras_datasets:fashion_mnist", "cnn", 128),
    "cifar10": Recipe("tfmulti.data.sources.keras_datasets:cifar10", "cnn", 128),
    "cifar100": Recipe("tfmulti.data.sources.keras_datasets:cifar100", "resnet20", 128),
    "npz": Recipe("tfmulti.data.sources.npz:load", "cnn", takes_options=True),
    "npy": Recipe("tfmulti.data.sources.npy:load", "cnn", takes_options=True),
    "images": Recipe("tfmulti.data.sources.images:load", "resnet20", 32, takes_options=True),
    "csv": Recipe(
        "tfmulti.data.sources.tables:load_csv", "mlp", 32, takes_options=True, skips_damage=True
    ),
    "parquet": Recipe(
        "tfmulti.data.sources.tables:load_parquet", "mlp", 32, takes_options=True, skips_damage=True
    ),
    "text": Recipe(
        "tfmulti.data.sources.text:load", "transformer", 32, takes_options=True, skips_damage=True
    ),
    "tfrecord": Recipe(
        "tfmulti.data.sources.tfrecord:load", "cnn", takes_options=True, skips_damage=True
    ),
    "tfds": Recipe("tfmulti.data.sources.tfds:load", "cnn", takes_options=True, skips_damage=True),
}

_USER_DATASET = Recipe("", "mlp")


def recipe_of(dataset: str) -> Recipe:
    """Returns the recipe of a `--dataset` value, such as `digits` or `npz:PATH`.

    Raises:
        ConfigError: no such data set, or options given to one that takes none.
    """
    name, _, options = dataset.partition(":")
    recipe = DATASETS.get(name)
    if recipe is None:
        if _is_place(dataset):
            return _USER_DATASET
        raise ConfigError(
            f"no data set {name!r} for --dataset; {did_you_mean(name, DATASETS)} "
            "Your own: package.module:function."
        )
    if options and not recipe.takes_options:
        raise ConfigError(
            f"--dataset {dataset}: data set {name!r} takes no options. Write --dataset {name}."
        )
    return recipe


def dataset_place(dataset: str) -> tuple[str, str | None]:
    """Returns where the loader of a `--dataset` value is, and the text after the name.

    The text is None for a user's own `package.module:function`.
    """
    recipe = recipe_of(dataset)
    if recipe is _USER_DATASET:
        return dataset, None
    return recipe.place, dataset.partition(":")[2]


def model_entry(model: str) -> ModelEntry:
    """Returns where the builder of a `--model` value is, and what data it takes."""
    places = {name: entry.place for name, entry in MODELS.items()}
    place = _place("model", model, places, own=True)
    return MODELS.get(model, ModelEntry(place))


def default_model(wanted: str, kind: str | None) -> str:
    """Returns the wanted model, or a plain one where that does not take this kind of data."""
    if kind is None or not MODELS[wanted].takes or kind in MODELS[wanted].takes:
        return wanted
    return {"image": "cnn", "tokens": "transformer"}.get(kind, "mlp")


def optimizer_place(optimizer: str) -> str:
    """Returns where the maker of an `--optimizer` value is."""
    return _place("optimizer", optimizer, OPTIMIZERS, own=False)


def _place(kind: str, name: str, table: Mapping[str, str], *, own: bool) -> str:
    if name in table:
        return table[name]
    if own and _is_place(name):
        return name
    tail = " Your own: package.module:function." if own else ""
    raise ConfigError(f"no {kind} {name!r} for --{kind}; {did_you_mean(name, table)}{tail}")


def _is_place(name: str) -> bool:
    module, colon, function = name.partition(":")
    parts = module.split(".")
    return bool(colon) and function.isidentifier() and all(p.isidentifier() for p in parts)


def check_place(flag: str, place: str) -> None:
    """Checks that the module of `package.module:function` can be found, without running it.

    Raises:
        ConfigError: there is no such module.
    """
    module = place.partition(":")[0]
    try:
        found = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        raise ConfigError(
            f"--{flag} {place}: no module {module!r}. It must be importable from this folder "
            "or from PYTHONPATH."
        )


def check_dataset(dataset: str) -> None:
    """Checks that a user's own function of a `--dataset` value is there, without running it.

    Raises:
        ConfigError: there is no such module or function.
    """
    place, options = dataset_place(dataset)
    if options is None:
        check_place("dataset", place)
        _check_function("dataset", place)


def _check_function(flag: str, place: str) -> None:
    """Reads the module's source for the function's name.

    What a module makes when it is imported cannot be known so: then nothing is said.
    """
    module, _, name = place.partition(":")
    spec = importlib.util.find_spec(module)
    try:
        tree = ast.parse(Path(str(spec and spec.origin)).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    functions = [
        node.name
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    ]
    words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    words |= {alias.asname or alias.name for node in imports for alias in node.names}
    dynamic = {"*", "globals", "setattr", "__getattr__"} & (words | set(functions))
    if name not in functions and name not in words and not dynamic:
        raise ConfigError(_no_function(flag, place, functions))


def _no_function(flag: str, place: str, functions: list[str]) -> str:
    module, _, name = place.partition(":")
    public = [function for function in functions if not function.startswith("_")]
    return f"--{flag} {place}: no function {name!r} in {module!r}; " + did_you_mean(name, public)


def load_place(flag: str, place: str) -> Callable[..., Any]:
    """Returns the function at `package.module:function`.

    Raises:
        ConfigError: the module or the function is not there, or is no function.
    """
    check_place(flag, place)
    module_name, _, name = place.partition(":")
    try:
        module = importlib.import_module(module_name)
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(
            f"--{flag} {place}: importing {module_name!r} failed with "
            f"{type(error).__name__}: {error}. Fix that module."
        ) from error
    function = getattr(module, name, None)
    if function is None:
        callables = [n for n, value in vars(module).items() if callable(value)]
        raise ConfigError(_no_function(flag, place, callables))
    if not callable(function):
        raise ConfigError(
            f"--{flag} {place}: {name!r} is a {type(function).__name__}, not a function."
        )
    return function  # type: ignore[no-any-return]

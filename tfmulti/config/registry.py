"""Lists the models, data sets and optimizers that flags accept, with the defaults of a run.

To add a model or a data set, write a file with its code and add a line here. A reference is a text
of the form `package.module:function`, so a mistyped name is answered without importing TensorFlow.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfmulti.errors import ConfigError, UserError, did_you_mean


@dataclass(frozen=True)
class ModelEntry:
    """A reference to a model's function, and the data that the model takes.

    Attributes:
        reference: the function that builds the model.
        takes: the kinds of data (`DataSpec.kind`) that the model takes. Empty: any kind.
        example_data: the options for `synthetic` data in the form that the model was made for.
        learning_rate: the default learning rate. None: the default of the data set, which trains
            most models.
    """

    reference: str
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

# The names of the strategies that `cluster.selection` chooses from.
STRATEGIES = ("auto", "one_device", "mirrored", "multi_worker_mirrored")
# The names of the optimizers that `run.optimizers` makes.
OPTIMIZERS = ("sgd", "adam", "adamw", "lamb", "adafactor", "lion", "muon")


@dataclass(frozen=True)
class Recipe:
    """The reference of a data set's loader, and the defaults of a run that uses the data set.

    Attributes:
        reference: the function that loads the data.
        model: the default model.
        global_batch_size: the default global batch size. None: the user must give one.
        epochs: the default number of epochs.
        steps_per_epoch: the default number of steps. None: an epoch has each example once.
        optimizer: the default optimizer.
        learning_rate: the default learning rate.
        takes_options: whether options may follow the name, as in `npz:PATH`.
    """

    reference: str
    model: str
    global_batch_size: int | None = None
    epochs: int = 10
    steps_per_epoch: int | None = None
    optimizer: str = "adam"
    learning_rate: float = 0.001
    takes_options: bool = False


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
    "csv": Recipe("tfmulti.data.sources.tables:load_csv", "mlp", 32, takes_options=True),
    "parquet": Recipe("tfmulti.data.sources.tables:load_parquet", "mlp", 32, takes_options=True),
    "text": Recipe("tfmulti.data.sources.text:load", "transformer", 32, takes_options=True),
    "tfrecord": Recipe("tfmulti.data.sources.tfrecord:load", "cnn", takes_options=True),
    "tfds": Recipe("tfmulti.data.sources.tfds:load", "cnn", takes_options=True),
}

_USER_DATASET = Recipe("", "mlp")


def recipe_of(dataset: str) -> Recipe:
    """Returns the recipe of a `--dataset` value, such as `digits` or `npz:PATH`.

    Raises:
        ConfigError: the data set is unknown, or options follow a name that takes none.
    """
    name, _, options = dataset.partition(":")
    recipe = DATASETS.get(name)
    if recipe is None:
        if _is_reference(dataset):
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


def dataset_reference(dataset: str) -> tuple[str, str | None]:
    """Returns the reference of the loader of a `--dataset` value, and the options after its name.

    For a user's own `package.module:function` the options are None.

    Raises:
        ConfigError: the data set is unknown, or options follow a name that takes none.
    """
    recipe = recipe_of(dataset)
    if recipe is _USER_DATASET:
        return dataset, None
    return recipe.reference, dataset.partition(":")[2]


def model_entry(model: str) -> ModelEntry:
    """Returns the entry of a `--model` value. A user's own function takes any kind of data.

    Raises:
        ConfigError: the model is unknown.
    """
    if model in MODELS:
        return MODELS[model]
    if _is_reference(model):
        return ModelEntry(model)
    raise ConfigError(
        f"no model {model!r} for --model; {did_you_mean(model, MODELS)} "
        "Your own: package.module:function."
    )


def default_model(wanted: str, kind: str | None) -> str:
    """Returns the wanted model, or a simple one for this kind of data if the model cannot take it.

    Args:
        wanted: a name in `MODELS`.
        kind: the kind of the data (`DataSpec.kind`), or None if it is not known.
    """
    if kind is None or not MODELS[wanted].takes or kind in MODELS[wanted].takes:
        return wanted
    return {"image": "cnn", "tokens": "transformer"}.get(kind, "mlp")


def check_optimizer(optimizer: str) -> None:
    """Raises ConfigError if there is no optimizer of that name."""
    if optimizer not in OPTIMIZERS:
        raise ConfigError(
            f"no optimizer {optimizer!r} for --optimizer; {did_you_mean(optimizer, OPTIMIZERS)}"
        )


def _is_reference(name: str) -> bool:
    """Returns whether a text has the form `package.module:function`."""
    module, colon, function = name.partition(":")
    parts = module.split(".")
    return bool(colon) and function.isidentifier() and all(p.isidentifier() for p in parts)


def check_reference(flag: str, reference: str) -> None:
    """Checks that the module of `package.module:function` can be found, without importing it.

    Python imports the packages above the module to look for it.

    Args:
        flag: the name of the flag, for the message.
        reference: the text `package.module:function`.

    Raises:
        ConfigError: the module cannot be found.
    """
    module = reference.partition(":")[0]
    try:
        exists = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        exists = False
    if not exists:
        raise ConfigError(
            f"--{flag} {reference}: no module {module!r}. It must be importable from this folder "
            "or from PYTHONPATH."
        )


def check_dataset(dataset: str) -> None:
    """Checks that the user's own function of a `--dataset` value exists, without running it.

    Raises:
        ConfigError: the module or the function does not exist.
    """
    reference, options = dataset_reference(dataset)
    if options is None:
        check_reference("dataset", reference)
        _check_function("dataset", reference)


def _check_function(flag: str, reference: str) -> None:
    """Raises ConfigError if the source text of a module has no function of that name.

    If the source cannot be read, or if the module may make names while it is imported, there is
    no error.
    """
    module, _, name = reference.partition(":")
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
        raise ConfigError(_no_function(flag, reference, functions))


def _no_function(flag: str, reference: str, functions: list[str]) -> str:
    """Returns the message for a function that its module does not have."""
    module, _, name = reference.partition(":")
    public = [function for function in functions if not function.startswith("_")]
    return f"--{flag} {reference}: no function {name!r} in {module!r}; " + did_you_mean(
        name, public
    )


def load_reference(flag: str, reference: str) -> Callable[..., Any]:
    """Imports a module, and returns its function at `package.module:function`.

    Args:
        flag: the name of the flag, for messages.
        reference: the text `package.module:function`.

    Raises:
        ConfigError: the module cannot be found or imported, or it has no function of that name.
    """
    check_reference(flag, reference)
    module_name, _, name = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(
            f"--{flag} {reference}: importing {module_name!r} failed with "
            f"{type(error).__name__}: {error}. Fix that module."
        ) from error
    function = getattr(module, name, None)
    if function is None:
        callables = [n for n, value in vars(module).items() if callable(value)]
        raise ConfigError(_no_function(flag, reference, callables))
    if not callable(function):
        raise ConfigError(
            f"--{flag} {reference}: {name!r} is a {type(function).__name__}, not a function."
        )
    return function  # type: ignore[no-any-return]

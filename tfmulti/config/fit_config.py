"""What a run is: `FitConfig`, as flags, as a JSON file and as arguments in Python.

A `FitConfig` that exists is valid in itself. What also needs the cluster or the devices
(which strategy, how many replicas, so which batch) is decided in `selection` and `loop`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfmulti.config import json_values, registry
from tfmulti.errors import ConfigError, ResumeError, RunDirError, did_you_mean

STRATEGIES = ("auto", "one_device", "mirrored", "multi_worker_mirrored")
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
DECAYS = ("constant", "cosine")
RESUME = ("auto", "never", "must")
VERBOSITIES = ("auto", "0", "1", "2")
COMPRESSIONS = ("none", "float16", "bfloat16")
CACHES = ("none", "memory", "disk")


def _flag(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    above: float | None = None,
    below: float | None = None,
    path: bool = False,
    free: bool = False,
) -> Any:
    """Returns a field with what its flag needs: help text, choices and bounds.

    A `free` one may change between a stop and the resumption: where and for how long it runs.
    """
    limits = {"low": low, "above": above, "below": below}
    rules = {"help": help, "choices": choices, "path": path, "free": free, **limits}
    return field(default=default, metadata=rules)


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """Everything that `python -m tfmulti.fit` takes; each field is a flag of the same name.

    Raises:
        ConfigError: a value breaks its field's rule, or two fields contradict each other.

    >>> FitConfig(dataset="digits", epochs=3).epochs
    3
    """

    strategy: str = _flag(
        "auto",
        "How the work is spread. auto: a cluster in the environment means several "
        "workers, several GPUs mean mirrored, else one device.",
        choices=STRATEGIES,
        free=True,
    )
    replicas: int | None = _flag(
        None,
        "Local devices to use. Without GPUs: that many logical CPU devices. "
        "Default: all GPUs, or one CPU device.",
        low=1,
        free=True,
    )
    ignore_cluster: bool = _flag(
        False, "Train on this machine alone although TF_CONFIG describes a cluster.", free=True
    )
    dataset: str = _flag(
        "digits",
        "Data: digits, regression, mnist, fashion_mnist, cifar10, cifar100, "
        "synthetic[:shape=28x28x1,classes=10,examples=1024], npz:PATH, npy:FOLDER, "
        "csv:PATTERN,target=COLUMN, parquet:PATTERN,target=COLUMN, images:FOLDER, text:FOLDER, "
        "tfrecord:PATTERN, tfds:NAME, or your own package.module:function.",
    )
    model: str | None = _flag(
        None,
        f"Model: {', '.join(registry.MODELS)}, or your own package.module:function. "
        "Default: what suits the data.",
    )
    global_batch_size: int | None = _flag(
        None, "Examples of one optimizer step over all replicas of all workers.", low=1, free=True
    )
    per_replica_batch_size: int | None = _flag(
        None,
        "Examples of one step on each replica; the global batch is that times the "
        "replicas. Give one of the two.",
        low=1,
        free=True,
    )
    epochs: int | None = _flag(
        None, "Epochs to train. Default: what suits the data.", low=1, free=True
    )
    steps_per_epoch: int | None = _flag(
        None, "Steps of one epoch. Default: each example once.", low=1
    )
    validation_fraction: float = _flag(
        0.1,
        "Part of the training data set aside for validation where the data has no "
        "validation part of its own; 0: none.",
        low=0,
        below=1,
    )
    training_split: str | None = _flag(
        None, "What is trained on: train, or a slice of a part such as train[:90%]."
    )
    validation_split: str | None = _flag(
        None, "What is validated on, in the same words; slices are of an order drawn by the seed."
    )
    test_split: str | None = _flag(None, "What is tested on, in the same words.")
    augment: str | None = _flag(
        None,
        "Random changes of training images, new in each epoch: flip, shift, rotate, crop, "
        "brightness, contrast, with commas between.",
    )
    class_weight: str | None = _flag(
        None, "Weights of the classes in training: balanced, or 0:1,3:2.5 (others: 1)."
    )
    cache: str = _flag(
        "none",
        "Keep examples after they were read and decoded once, in memory or in files in "
        "$TFMULTI_CACHE (~/.cache/tfmulti), which later runs find again.",
        choices=CACHES,
        free=True,
    )
    reader_threads: int | None = _flag(
        None,
        "Examples that each worker reads at a time; 0: in the thread that feeds the steps. "
        "Default: as many as it has cores, where reading is slow.",
        low=0,
        free=True,
    )
    max_image_megapixels: int = _flag(
        128,
        "Images of more millions of pixels are not read: a small file may stand for any number.",
        low=1,
        free=True,
    )
    skip_bad_records: int = _flag(
        0,
        "Leave out up to so many examples that cannot be read in each pass over the data, over "
        "all workers together, with the rows of CSV and Parquet files that cannot be; each is "
        "named. GZIP files of records are unpacked for it. Default: the first one is an error.",
        low=0,
        free=True,
    )
    optimizer: str | None = _flag(
        None, f"Optimizer: {', '.join(registry.OPTIMIZERS)}. Default: what suits the data."
    )
    learning_rate: float | None = _flag(
        None, "Learning rate after warm-up. Default: what suits the data.", above=0
    )
    momentum: float = _flag(0.9, "Momentum of sgd.", low=0, below=1)
    weight_decay: float | None = _flag(None, "Decoupled weight decay of the optimizer.", low=0)
    warmup_steps: int = _flag(0, "Steps over which the learning rate rises linearly from 0.", low=0)
    learning_rate_decay: str = _flag(
        "constant",
        "What follows the warm-up: constant, or cosine down to 0 at the last step.",
        choices=DECAYS,
    )
    scale_learning_rate: int | None = _flag(
        None,
        "Base batch of the linear scaling rule: the learning rate is multiplied by "
        "global batch / base batch.",
        low=1,
    )
    precision: str = _flag("float32", "Keras dtype policy.", choices=PRECISIONS)
    seed: int = _flag(0, "Seed of weights, data order and dropout.", low=0, below=2**32)
    op_determinism: bool = _flag(
        False,
        "TensorFlow's ops add in the same order each time, where a GPU's would not: slower, and "
        "needed there for two runs that are equal to the bit.",
        free=True,
    )
    microbatches: int = _flag(
        1,
        "Passes of one step: each replica computes its rows in that many parts, to save memory, "
        "and the weights are updated once, by the gradient of the whole batch.",
        low=1,
        free=True,
    )
    sync_batch_norm: bool = _flag(
        True,
        "BatchNormalization over the rows of all replicas, as on one device; "
        "--nosync_batch_norm: each replica's own, faster, averaged before saving.",
    )
    gradient_compression: str = _flag(
        "none",
        "Gradients between workers in half the bytes: float16 or bfloat16, which round them; not "
        "one device's numbers to the last digits.",
        choices=COMPRESSIONS,
    )
    sync_every: int | None = _flag(
        None,
        "Each of several workers takes so many steps by itself, then all meet (DiLoCo): for slow "
        "networks; not one device's numbers. Default: all steps are taken together, exactly.",
        low=1,
    )
    outer_learning_rate: float = _flag(
        0.7, "What the workers' mean move is multiplied by where they meet.", above=0
    )
    outer_momentum: float = _flag(
        0.9, "Nesterov momentum of the moves between meetings.", low=0, below=1
    )
    steps_per_execution: int | None = _flag(
        None,
        "Optimizer steps of one call into TensorFlow; more hides the cost of a call. Default: "
        "one, and on CPUs, where calls turn out to cost more than compiling another step does, as "
        "many as last 0.1 s. With --sync_every they are those between two meetings.",
        low=1,
        free=True,
    )
    jit_compile: bool | None = _flag(
        None,
        "XLA compiles each replica's forward and backward pass; --nojit_compile: it does not. "
        "Default: on GPUs. Not where replicas need each other before their gradients meet, or "
        "random numbers are drawn.",
    )
    verify: bool | None = _flag(
        None,
        "Take the first step also on one device by plain Keras, and fail where the numbers differ "
        "by more than rounding. Default: with several replicas, where a train_step, loss, metric, "
        "layer or optimizer is your own.",
        free=True,
    )
    verify_steps: int = _flag(1, "How many first steps --verify compares.", low=1, free=True)
    log_throughput: bool = _flag(
        False,
        "Examples a second, of all devices and of one, the steps' times (p50, p90, p99) and model "
        "FLOPs utilisation, in the progress bar, TensorBoard and report.json.",
        free=True,
    )
    peak_tflops: float | None = _flag(
        None,
        "What one device can do at most in this precision, in TFLOP/s, for the utilisation that "
        "--log_throughput shows. Default: looked up for known GPUs; CPUs have none.",
        above=0,
        free=True,
    )
    run_dir: str | None = _flag(
        None,
        "Folder for all that the run writes. Default: runs/DATASET-MODEL-TIME. The same command "
        "with the folder of a run that was stopped goes on with it.",
        path=True,
        free=True,
    )
    resume: str = _flag(
        "auto",
        "auto: go on with the run in --run_dir, if it holds one; must: fail if it holds none; "
        "never: fail if it holds one.",
        choices=RESUME,
        free=True,
    )
    checkpoint_every_s: float = _flag(
        60.0,
        "Seconds between two checkpoints of a run in progress; 0: none by time.",
        low=0,
        free=True,
    )
    checkpoint_every_steps: int | None = _flag(
        None, "A checkpoint also after each so many optimizer steps.", low=1, free=True
    )
    keep_checkpoints: int = _flag(2, "How many checkpoints stay, the newest.", low=1, free=True)
    export_dir: str | None = _flag(
        None, "Also write a SavedModel for serving to this folder.", path=True, free=True
    )
    verbose: str = _flag(
        "auto",
        "0: silent, 1: progress bar, 2: a line an epoch, auto: 1 on a terminal, else 2.",
        choices=VERBOSITIES,
        free=True,
    )
    dry_run: bool = _flag(
        False,
        "Build all, run two training steps and one validation step, write nothing, "
        "and say what the full run would take.",
        free=True,
    )

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            _check_value(item, getattr(self, item.name))
        registry.recipe_of(self.dataset)
        if self.model is not None:
            registry.model_entry(self.model)
        if self.optimizer is not None:
            registry.optimizer_place(self.optimizer)
        if self.peak_tflops is not None and not self.log_throughput:
            raise ConfigError(
                f"--peak_tflops {self.peak_tflops:g} is for what --log_throughput shows. Give both."
            )
        self._check_meetings()
        self._check_batch()

    def _check_meetings(self) -> None:
        outer = [item for item in dataclasses.fields(self) if item.name.startswith("outer_")]
        for item in outer if self.sync_every is None else ():
            value = getattr(self, item.name)
            if value != item.default:
                raise ConfigError(
                    f"--{item.name} {value:g} is used where workers meet after steps of their own, "
                    "which takes --sync_every. Give both, or leave it out."
                )

    def _check_batch(self) -> None:
        if self.global_batch_size is not None and self.per_replica_batch_size is not None:
            raise ConfigError(
                f"both --global_batch_size {self.global_batch_size} and "
                f"--per_replica_batch_size {self.per_replica_batch_size} were given, but one "
                "follows from the other and the number of replicas. Give one of them."
            )
        given = self.global_batch_size or self.per_replica_batch_size
        if given is None and registry.recipe_of(self.dataset).global_batch_size is None:
            registry.check_dataset(self.dataset)
            raise ConfigError(
                f"--dataset {self.dataset} has no batch size of its own. "
                "Give --global_batch_size or --per_replica_batch_size."
            )

    def resolved(self, kind: str | None = None) -> FitConfig:
        """Returns the same configuration with the data set's defaults written out.

        `kind` is that of the data (`DataSpec.kind`), once it is known: the default model
        must take it.
        """
        recipe = registry.recipe_of(self.dataset)
        changes: dict[str, Any] = {}
        if self.global_batch_size is None and self.per_replica_batch_size is None:
            changes["global_batch_size"] = recipe.global_batch_size
        model = self.model or registry.default_model(recipe.model, kind)
        wanted = {
            "model": model,
            "epochs": recipe.epochs,
            "steps_per_epoch": recipe.steps_per_epoch,
            "optimizer": recipe.optimizer,
            "learning_rate": registry.model_entry(model).learning_rate or recipe.learning_rate,
        }
        changes |= {name: v for name, v in wanted.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        """Returns the configuration as JSON, without what belongs to this start alone."""
        left_out = {"run_dir", "export_dir", "dry_run", "resume"}
        values = {k: v for k, v in dataclasses.asdict(self).items() if k not in left_out}
        return json.dumps(values, indent=2) + "\n"


def check_same_run(saved: dict[str, Any], config: FitConfig, path: str) -> None:
    """Checks that a resolved configuration is that of the run in a folder.

    Raises:
        ResumeError: a value differs that the run's numbers depend on.
        RunDirError: the folder holds something else.
    """
    if "dataset" not in saved:
        raise RunDirError(
            f"--run_dir {path} holds another program's config.json. Give a new --run_dir."
        )
    for item in dataclasses.fields(FitConfig):
        now = getattr(config, item.name)
        if item.metadata["free"]:
            continue
        before = saved.get(item.name, item.default)  # an older version had no such flag
        if before != now:
            raise ResumeError(
                f"--run_dir {path} holds a run with {item.name}={before!r}, and this one has "
                f"{item.name}={now!r}. Give --{item.name}={before}, or a new --run_dir."
            )


def read_config_file(path: str) -> dict[str, Any]:
    """Returns the values that a JSON file of `FitConfig`'s fields gives.

    Raises:
        ConfigError: the file is missing, no JSON object, or names an unknown field.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--config {path}: {reason}. Give a readable JSON file.") from None
    try:
        values = json_values.parse(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"--config {path} is no JSON: {error.msg} in line {error.lineno}. Fix the file."
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"--config {path} must hold a JSON object, but holds a {type(values).__name__}."
        )
    known = {item.name for item in dataclasses.fields(FitConfig)}
    for name in values:
        if name not in known:
            raise ConfigError(f"--config {path}: no field {name!r}; {did_you_mean(name, known)}")
    return values


def base_type(item: dataclasses.Field[Any]) -> type:
    """Returns the type of a field's values, without `None`."""
    name = str(item.type).removesuffix(" | None")
    return {"str": str, "int": int, "float": float, "bool": bool}[name]


def _check_value(item: dataclasses.Field[Any], value: Any) -> None:
    if value is None and "None" in str(item.type):
        return
    kind = base_type(item)
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"--{item.name} is {value!r}, but it must be of type {kind.__name__}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"--{item.name} is {value!r}, but it must be a finite number.")
    rule = item.metadata
    if rule["choices"] and value not in rule["choices"]:
        raise ConfigError(
            f"no {item.name} {value!r} for --{item.name}; "
            + did_you_mean(str(value), rule["choices"])
        )
    for broken, words in (
        (rule["low"] is not None and not value >= rule["low"], f"at least {rule['low']}"),
        (rule["above"] is not None and not value > rule["above"], f"above {rule['above']}"),
        (rule["below"] is not None and not value < rule["below"], f"below {rule['below']}"),
    ):
        if broken:
            raise ConfigError(f"--{item.name} is {value!r}, but it must be {words}.")

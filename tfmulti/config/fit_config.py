"""`FitConfig`: the whole configuration of a run, given by flags, a JSON file or Python arguments.

The constructor checks the values, so each `FitConfig` is valid by itself. The strategy, the number
of replicas and the batch sizes depend on the cluster and the devices too. `run.validation` and
`run.setup` decide them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tfmulti.config import json_values, registry, trackers
from tfmulti.config.limited_reading import read_small
from tfmulti.config.training_options import (
    CHECKPOINT_EVERY_S,
    KEEP_CHECKPOINTS,
    RESUME,
    TrainingOptions,
    flag,
)
from tfmulti.errors import ConfigError, ResumeError, RunDirError, did_you_mean

PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
DECAYS = ("constant", "cosine")
# Copied from `tfmulti.cluster.environments`, because `config` stands below `cluster`.
# `test_environments.py` compares the two lists.
ENVIRONMENTS = (
    *("auto", "none", "tf_config", "mpi", "slurm", "lsf", "volcano", "kubernetes", "sagemaker"),
    *("vertex", "azureml"),
)
VERBOSITIES = ("auto", "0", "1", "2")
# Fields of older configurations that were removed, each with the reason and where to read more.
REMOVED = {
    name: "workers no longer train alone between synchronizations; see docs/slow-networks.md"
    for name in ("sync_every", "outer_learning_rate", "outer_momentum")
}
# The old names of fields in older configurations, with the present names.
RENAMED = {
    "backup_every_s": "checkpoint_every_s",
    "backup_every_steps": "checkpoint_every_steps",
    "keep_backups": "keep_checkpoints",
}
CACHES = ("none", "memory", "disk")
# The largest config.json of a run directory that is read.
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FitConfig(TrainingOptions):
    """Everything that `python -m tfmulti.fit` takes; each field is a flag of the same name.

    The inherited fields of `TrainingOptions` say how training is distributed.

    Raises:
        ConfigError: a value breaks the rule of its field, or two fields contradict each other.

    >>> FitConfig(dataset="digits", epochs=3).epochs
    3
    """

    _dashes: ClassVar[str] = "--"

    strategy: str = flag(
        "auto",
        "How the work is spread. auto: a cluster in the environment means several "
        "workers, several GPUs mean mirrored, else one device.",
        choices=registry.STRATEGIES,
        free=True,
    )
    replicas: int | None = flag(
        None,
        "Local devices to use. Without GPUs: that many logical CPU devices. "
        "Default: all GPUs, or one CPU device.",
        low=1,
        free=True,
    )
    environment: str = flag(
        "auto",
        "The launcher or scheduler whose variables describe the job: auto takes the one that is "
        "recognised (see tfmulti env), none ignores all.",
        choices=ENVIRONMENTS,
        free=True,
    )
    ignore_cluster: bool = flag(
        False,
        "Train on this machine alone although the environment describes a cluster.",
        free=True,
    )
    dataset: str = flag(
        "digits",
        "Data: digits, regression, mnist, fashion_mnist, cifar10, cifar100, "
        "synthetic[:shape=28x28x1,classes=10,examples=1024], npz:PATH, npy:FOLDER, "
        "csv:PATTERN,target=COLUMN, parquet:PATTERN,target=COLUMN, images:FOLDER, text:FOLDER, "
        "tfrecord:PATTERN, tfds:NAME, or your own package.module:function.",
    )
    model: str | None = flag(
        None,
        f"Model: {', '.join(registry.MODELS)}, or your own package.module:function. "
        "Default: what suits the data.",
    )
    global_batch_size: int | None = flag(
        None, "Examples of one optimizer step over all replicas of all workers.", low=1, free=True
    )
    per_replica_batch_size: int | None = flag(
        None,
        "Examples of one step on each replica; the global batch is that times the "
        "replicas. Give one of the two.",
        low=1,
        free=True,
    )
    epochs: int | None = flag(
        None, "Epochs to train. Default: what suits the data.", low=1, free=True
    )
    steps_per_epoch: int | None = flag(
        None, "Steps of one epoch. Default: each example once.", low=1
    )
    validation_fraction: float = flag(
        0.1,
        "Fraction of the training data for validation, if the data has no validation part; "
        "0: none.",
        low=0,
        below=1,
    )
    training_split: str | None = flag(
        None, "Examples for training: train, or a slice of a part such as train[:90%]."
    )
    validation_split: str | None = flag(
        None,
        "Examples for validation, written like --training_split. Slices follow an order that the "
        "seed draws.",
    )
    test_split: str | None = flag(None, "Examples for the test, written like --training_split.")
    augment: str | None = flag(
        None,
        "Random changes of training images, new in each epoch, separated by commas: flip, shift, "
        "rotate, crop, brightness, contrast.",
    )
    class_weight: str | None = flag(
        None, "Weights of the classes in training: balanced, or 0:1,3:2.5 (others: 1)."
    )
    cache: str = flag(
        "none",
        "Keep examples after they were read and decoded once, in memory or in files in "
        "$TFMULTI_CACHE (~/.cache/tfmulti), which later runs reuse.",
        choices=CACHES,
        free=True,
    )
    max_image_megapixels: int = flag(
        128,
        "Largest image to decode, in millions of pixels. A small file can hold a huge image.",
        low=1,
        free=True,
    )
    max_file_gigabytes: float | None = flag(
        None,
        "npz, Parquet and csv.gz files that unpack to more are not read. Default: the memory of "
        "this machine or container.",
        above=0,
        free=True,
    )
    optimizer: str | None = flag(
        None, f"Optimizer: {', '.join(registry.OPTIMIZERS)}. Default: the data set's own."
    )
    learning_rate: float | None = flag(
        None, "Learning rate after warm-up. Default: the data set's own.", above=0
    )
    momentum: float = flag(0.9, "Momentum of sgd.", low=0, below=1)
    weight_decay: float | None = flag(None, "Decoupled weight decay of the optimizer.", low=0)
    warmup_steps: int = flag(0, "Steps over which the learning rate rises linearly from 0.", low=0)
    learning_rate_decay: str = flag(
        "constant",
        "What follows the warm-up: constant, or cosine down to 0 at the last step.",
        choices=DECAYS,
    )
    scale_learning_rate: int | None = flag(
        None,
        "Base batch of the linear scaling rule: the learning rate is multiplied by "
        "global batch / base batch.",
        low=1,
    )
    precision: str = flag("float32", "Keras dtype policy.", choices=PRECISIONS)
    seed: int = flag(0, "Seed of weights, data order and dropout.", low=0, below=2**32)
    op_determinism: bool = flag(
        False,
        "Make TensorFlow's operations deterministic. Two runs on GPUs are equal to the bit only "
        "with it. It is slower.",
        free=True,
    )
    # Here a number is allowed, and None means what `prepare` calls `auto`: on CPUs the number of
    # steps is chosen.
    steps_per_execution: int | None = flag(  # type: ignore[assignment]
        None,
        "Optimizer steps of one call into TensorFlow. More steps hide the cost of a call. Default: "
        "one; on CPUs as many as take 0.1 s, if that saves time.",
        low=1,
        free=True,
    )
    log_throughput: bool = flag(
        False,
        "Log examples per second (of all devices and of each), step times (p50, p90, p99) and "
        "model FLOPs utilisation to the progress bar, TensorBoard and report.json.",
        free=True,
    )
    peak_tflops: float | None = flag(
        None,
        "Peak TFLOP/s of one device in this precision, for the utilisation that --log_throughput "
        "shows. Default: looked up for known GPUs; CPUs have none.",
        above=0,
        free=True,
    )
    tracker: str = flag(
        "tensorboard",
        f"Where metrics are logged, separated by commas: {', '.join(trackers.TRACKERS)}; or "
        f"{trackers.NONE}. {trackers.TENSORBOARD} writes to the run directory. A resumed run "
        "continues the same run of the tracker.",
        free=True,
    )
    run_dir: str | None = flag(
        None,
        "Folder of the run's files. Default: runs/DATASET-MODEL-TIME. The same command with the "
        "folder of a stopped run resumes that run.",
        path=True,
        free=True,
    )
    shared_run_dir: bool = flag(
        True,
        "Whether all workers see --run_dir. Any worker may become the chief after a restart. "
        "false: the folder is on a disk of worker 0, which always runs on the same machine.",
        free=True,
    )
    resume: str = flag(
        "auto",
        "auto: resume the run in --run_dir, if there is one; must: fail if there is none; "
        "never: fail if there is one.",
        choices=RESUME,
        free=True,
    )
    checkpoint_every_s: float = flag(
        CHECKPOINT_EVERY_S,
        "Seconds between two checkpoints; 0: no checkpoints by time.",
        low=0,
        free=True,
    )
    checkpoint_every_steps: int | None = flag(
        None, "Also write a checkpoint every so many optimizer steps.", low=1, free=True
    )
    keep_checkpoints: int = flag(
        KEEP_CHECKPOINTS, "Number of newest checkpoints to keep.", low=1, free=True
    )
    export_dir: str | None = flag(
        None, "Also write a SavedModel for serving to this folder.", path=True, free=True
    )
    verbose: str = flag(
        "auto",
        "0: silent, 1: progress bar, 2: a line an epoch, auto: 1 on a terminal, else 2.",
        choices=VERBOSITIES,
        free=True,
    )
    dry_run: bool = flag(
        False,
        "Build the model, print the memory of a step, run two training steps and one validation "
        "step, and print the time of the full run. Nothing is written.",
        free=True,
    )
    device_memory_gb: float | None = flag(
        None,
        "With --dry_run: the memory of a device in GB, to print what fits. Default: the memory of "
        "the GPUs.",
        above=0,
        free=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        registry.recipe_of(self.dataset)
        if self.model is not None:
            registry.model_entry(self.model)
        if self.optimizer is not None:
            registry.check_optimizer(self.optimizer)
        if self.peak_tflops is not None and not self.log_throughput:
            raise ConfigError(
                f"--peak_tflops {self.peak_tflops:g} has an effect only with --log_throughput. "
                "Give both."
            )
        if self.device_memory_gb is not None and not self.dry_run:
            raise ConfigError(
                f"--device_memory_gb {self.device_memory_gb:g} has an effect only with --dry_run. "
                "Give both."
            )
        trackers.names_in(self.tracker)
        self._check_batch()

    def _check_batch(self) -> None:
        """Raises ConfigError unless exactly one batch size is given, or the data set has one."""
        if self.global_batch_size is not None and self.per_replica_batch_size is not None:
            raise ConfigError(
                f"both --global_batch_size {self.global_batch_size} and "
                f"--per_replica_batch_size {self.per_replica_batch_size} were given, but one "
                "follows from the other and the number of replicas. Give one of them."
            )
        batch_size = self.global_batch_size or self.per_replica_batch_size
        if batch_size is None and registry.recipe_of(self.dataset).global_batch_size is None:
            registry.check_dataset(self.dataset)
            raise ConfigError(
                f"no batch size was given for --dataset {self.dataset}. "
                "Give --global_batch_size or --per_replica_batch_size."
            )

    @property
    def training_options(self) -> TrainingOptions:
        """The options for `prepare`."""
        names = [item.name for item in dataclasses.fields(TrainingOptions)]
        values = {name: getattr(self, name) for name in names}
        # A number goes to `compile`. Without a number, `auto` chooses one on CPUs.
        values["steps_per_execution"] = "auto" if self.steps_per_execution is None else None
        return TrainingOptions(**values)

    def resolved(self, kind: str | None = None) -> FitConfig:
        """Returns the same configuration with the defaults of the data set filled in.

        Args:
            kind: the kind of the data (`DataSpec.kind`), or None before the data is loaded. The
                default model must take data of this kind.
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

    def values_given(self) -> dict[str, Any]:
        """Returns the values that a tracker logs: all fields that are not None."""
        return {name: v for name, v in dataclasses.asdict(self).items() if v is not None}

    def to_json(self) -> str:
        """Returns the configuration as JSON, without the fields that belong to one start only."""
        left_out = {"run_dir", "export_dir", "dry_run", "device_memory_gb", "resume"}
        values = {k: v for k, v in dataclasses.asdict(self).items() if k not in left_out}
        return json.dumps(values, indent=2) + "\n"


def check_same_run(saved: dict[str, Any], config: FitConfig, path: str) -> None:
    """Checks that a resolved configuration can resume the run that a folder holds.

    Args:
        saved: the values of the folder's config.json.
        config: the resolved configuration of this start.
        path: the folder, for messages.

    Raises:
        ResumeError: a field differs that changes the numbers of the run.
        RunDirError: config.json does not come from a run of this program.
    """
    if "dataset" not in saved:
        raise RunDirError(
            f"--run_dir {path} holds another program's config.json. Give a new --run_dir."
        )
    for item in dataclasses.fields(FitConfig):
        now = getattr(config, item.name)
        if item.metadata["free"]:
            continue
        # A run of an older version may lack the flag. Such a run has used its default.
        before = saved.get(item.name, item.default)
        if before != now:
            raise ResumeError(
                f"--run_dir {path} holds a run with {item.name}={before!r}, and this one has "
                f"{item.name}={now!r}. Give --{item.name}={before}, or a new --run_dir."
            )


def read_config_file(path: str) -> dict[str, Any]:
    """Returns the values of the JSON file of `--config` by the names of `FitConfig`'s fields.

    Old names of fields are accepted. The file may be a pipe, as in `--config <(program)`.

    Raises:
        ConfigError: the file cannot be read, is not a JSON object, or has an unknown or removed
            field.
    """
    return _values_of(f"--config {path}", lambda: Path(path).read_bytes())


def read_saved_config(path: Path) -> dict[str, Any]:
    """Returns the values of the config.json of a run directory, as `read_config_file`.

    Raises:
        ConfigError: the file is not a small regular file, or has another form.
    """
    return _values_of(str(path), lambda: read_small(path, _MOST_BYTES))


def _values_of(origin: str, read: Callable[[], bytes]) -> dict[str, Any]:
    """Returns the values of a JSON file, or raises ConfigError that begins with its origin."""
    try:
        text = read().decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{origin}: {reason}. Give a readable JSON file.") from None
    try:
        values = json_values.parse(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{origin} is not JSON: {error.msg} in line {error.lineno}. Fix the file."
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{origin} must hold a JSON object, but holds a {type(values).__name__}.")
    return with_present_names(values, origin)


def with_present_names(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Returns the values of `FitConfig`'s fields by their present names.

    Args:
        values: the values by name. Old names of fields are accepted.
        origin: where the values come from, for messages.

    Raises:
        ConfigError: a field is unknown, or was removed.
    """
    known = {item.name for item in dataclasses.fields(FitConfig)}
    values = {RENAMED.get(name, name): value for name, value in values.items()}
    if values.get("sync_every") is None:
        values = {name: value for name, value in values.items() if name not in REMOVED}
    for name in values:
        if name in REMOVED:
            raise ConfigError(f"{origin}: {name} was removed: {REMOVED[name]}. Leave it out.")
        if name not in known:
            raise ConfigError(f"{origin}: no field {name!r}; {did_you_mean(name, known)}")
    return values

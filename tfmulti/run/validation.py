"""Finds the user's mistakes before TensorFlow starts, and decides what a run needs to start.

`check` turns a configuration into a `Job`: it decides the devices and the batch sizes, loads the
data of a built-in data set, and checks that all of them fit together.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tfmulti.cluster.cluster import Cluster
from tfmulti.cluster.environments import check_trains, find_cluster
from tfmulti.cluster.gpus import gpus_of_task
from tfmulti.cluster.selection import BatchSizes, Selection, batch_sizes, select
from tfmulti.config import registry
from tfmulti.config.fit_config import FitConfig, check_same_run, read_saved_config
from tfmulti.config.limited_reading import read_small
from tfmulti.config.run_directory import RunDir, check_new, check_writable
from tfmulti.config.trackers import check_installed, names_in
from tfmulti.data.data_set import DataSet, size_of
from tfmulti.data.formats.pixels import limit_pixels
from tfmulti.data.io.files import limit_unpacked
from tfmulti.errors import ConfigError, ModelError, ResumeError
from tfmulti.run.data_stages import prepared
from tfmulti.run.report import FitReport

# A report has some numbers for each epoch.
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Job:
    """A checked configuration, with its cluster, devices, batch sizes and data.

    Attributes:
        config: the configuration, with every default filled in.
        cluster: the cluster of this process, or None.
        devices: the strategy and the devices.
        batch: the batch sizes.
        data: the data. None for a user's own function, which may run only after the devices are
            set up.
        done: the report of the run in --run_dir if that run is finished, or None.
    """

    config: FitConfig
    cluster: Cluster | None
    devices: Devices
    batch: BatchSizes
    data: DataSet | None
    done: FitReport | None = None


@dataclass(frozen=True)
class Devices:
    """The strategy of a run, and how many devices it has.

    Attributes:
        selection: the strategy, this worker's replicas, and the reason.
        gpus: the number of GPUs that this process may use, from which the strategy was chosen.
        workers: the number of workers.
    """

    selection: Selection
    gpus: int
    workers: int

    @property
    def replicas(self) -> int:
        """The number of all replicas."""
        return self.workers * self.selection.local_replicas


def decide_devices(config: FitConfig, cluster: Cluster | None, gpus: int) -> Devices:
    """Returns the strategy and the devices of a run.

    Args:
        config: the configuration.
        cluster: the cluster of this process, or None.
        gpus: the number of GPUs that this process may use.

    Raises:
        ConfigError: the strategy does not fit the cluster.
        DeviceError: the number of replicas does not fit the strategy or the devices.
    """
    selection = select(
        config.strategy,
        replicas=config.replicas,
        cluster=cluster,
        gpus=gpus,
        ignore_cluster=config.ignore_cluster,
    )
    several = cluster is not None and selection.strategy == "multi_worker_mirrored"
    return Devices(selection, gpus, cluster.size if cluster is not None and several else 1)


def check(
    config: FitConfig, cluster: Cluster | None = None, env: Mapping[str, str] | None = None
) -> Job:
    """Checks a configuration, and returns the job that it describes.

    Every worker calls this function. It writes nothing to the run directory.

    Args:
        config: the configuration.
        cluster: the cluster of this process. None reads it from the environment.
        env: the environment. None: `os.environ`.

    Raises:
        UserError: a mistake that can be found before the devices are set up.
    """
    env = os.environ if env is None else env
    if cluster is None:
        cluster, _ = find_cluster(env, config.environment)
    check_trains(cluster)
    resumes = False
    rank_and_size = (0, 1) if cluster is None else (cluster.local_rank, cluster.local_size)
    devices = decide_devices(config, cluster, len(gpus_of_task(env, *rank_and_size)))
    if config.run_dir is not None:
        resumes = _resumes(config, RunDir(config.run_dir))
    elif config.resume == "must":
        raise ResumeError("--resume must, but no --run_dir was given to say which run.")
    elif not config.dry_run:
        check_writable("run_dir", Path("runs"))
    _check_references(config)
    for name in names_in(config.tracker):
        # Any worker may be the chief after a restart.
        check_installed(name)
    data = load_data(config)
    resolved = config.resolved(data.spec.kind if data and data.spec else None)
    batch = batch_sizes(
        resolved.global_batch_size, resolved.per_replica_batch_size, devices.replicas
    )
    if data is not None:
        check_model_takes(resolved, data)
        check_batch(resolved, data, batch, devices.replicas)
    done = None
    if resumes and config.run_dir is not None:
        run_dir = RunDir(config.run_dir)
        check_same_run(read_saved_config(run_dir.config), resolved, str(run_dir.path))
        done = _report_of(run_dir, resolved)
    if config.export_dir is not None and done is None:
        check_new("export_dir", Path(config.export_dir))
    cluster = None if config.ignore_cluster else cluster
    return Job(resolved, cluster, devices, batch, data, done)


def _resumes(config: FitConfig, run_dir: RunDir) -> bool:
    """Returns whether the folder holds a run to resume, without writing.

    Raises:
        ResumeError: there is no run, but `--resume must` asks for one.
        RunDirError: the folder cannot be used.
    """
    if config.resume != "never" and run_dir.holds_run():
        check_writable("run_dir", run_dir.path)
        return True
    if config.resume == "must":
        raise ResumeError(
            f"--resume must, but --run_dir {run_dir.path} holds no run. Give the folder of the run "
            "to go on with, or leave --resume out."
        )
    run_dir.check_unused()
    return False


def _report_of(run_dir: RunDir, config: FitConfig) -> FitReport | None:
    """Returns the report of a run if all its epochs are trained, or None."""
    try:
        report = FitReport.from_json(read_small(run_dir.report, _MOST_BYTES))
    except (OSError, ValueError):
        return None
    assert config.epochs is not None
    is_done = report.stopped_by is None and report.epochs_asked >= config.epochs
    return report if is_done else None


def load_data(config: FitConfig) -> DataSet | None:
    """Returns the data of a built-in `--dataset`, or None for a user's own function.

    Raises:
        UserError: the data cannot be loaded, or not transformed as asked.
    """
    reference, options = registry.dataset_reference(config.dataset)
    if options is None:
        return None
    limit_pixels(config.max_image_megapixels)
    limit_unpacked(config.max_file_gigabytes)
    data = registry.load_reference("dataset", reference)(options, config.seed)
    assert isinstance(data, DataSet)
    if data.finish is not None and config.skip_bad_records:
        raise ConfigError(
            f"--skip_bad_records {config.skip_bad_records}: GZIP files are read as a stream, from "
            "which no record can be left out. gunzip them, or leave the flag out."
        )
    return prepared(data, config)


def check_model_takes(config: FitConfig, data: DataSet) -> None:
    """Checks that a built-in model takes data of this form.

    Raises:
        ModelError: the model takes other data.
    """
    assert config.model is not None
    takes = registry.model_entry(config.model).takes
    if not takes:
        return
    if data.spec is None:
        raise ModelError(
            f"--model {config.model} is built to the data's form, but --dataset {config.dataset} "
            "gives no plain arrays (x, y). Give your own --model package.module:function."
        )
    if data.spec.kind not in takes:
        fitting = [name for name, entry in registry.MODELS.items() if data.spec.kind in entry.takes]
        raise ModelError(
            f"--model {config.model} takes {' or '.join(takes)} data, but --dataset "
            f"{config.dataset} has {data.spec.kind} examples ({data.spec.describe()}). "
            f"Use --model {' or '.join(fitting)}."
        )


def check_batch(config: FitConfig, data: DataSet, sizes: BatchSizes, replicas: int) -> None:
    """Checks the batch sizes against the training data and the microbatches.

    Args:
        config: the configuration, with every default filled in.
        data: the data.
        sizes: the batch sizes.
        replicas: the number of all replicas.

    Raises:
        ConfigError: the global batch is larger than the training data, or the largest replica slice
            has fewer rows than there are microbatches.
    """
    most = -(-sizes.global_batch_size // replicas)
    if config.microbatches > most:
        raise ConfigError(
            f"--microbatches {config.microbatches} is more than the {most} examples of a replica "
            f"({sizes.global_batch_size} in all on {replicas}). Use at most {most}."
        )
    rows = size_of(data.train)
    if rows is not None and sizes.global_batch_size > rows:
        flag = (
            f"--global_batch_size {config.global_batch_size}"
            if config.global_batch_size is not None
            else f"--per_replica_batch_size {config.per_replica_batch_size} on {replicas} replicas "
            f"({sizes.global_batch_size} in all)"
        )
        raise ConfigError(
            f"{flag} is larger than the training data, which has {rows} examples. "
            f"Use at most {rows} in all."
        )


def _check_references(config: FitConfig) -> None:
    """Raises ConfigError if the module of a user's own model or data set cannot be found."""
    if config.model is not None and config.model not in registry.MODELS:
        registry.check_reference("model", config.model)
    reference, options = registry.dataset_reference(config.dataset)
    if options is None:
        registry.check_reference("dataset", reference)

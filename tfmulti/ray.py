"""Trains under Ray Train: a whole run by `train_loop`, or your own loop with `Checkpoint`.

    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer
    import tfmulti.ray

    result = TensorflowTrainer(
        tfmulti.ray.train_loop,
        train_loop_config={"dataset": "digits", "epochs": 3},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path="/shared/ray", failure_config=FailureConfig(-1)),
    ).fit()

Ray sets TF_CONFIG on each worker, so `make_strategy` finds the others. Each checkpoint of the run
goes to Ray's storage with the metrics. After the loss of a worker Ray starts all workers again, and
they resume from the newest checkpoint exactly.

`ray.train.report` waits for all workers, so all of them report at the same places: where tfmulti
makes a checkpoint, after each epoch, and at the end.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import ray.train

from tfmulti.cluster.environments import find_cluster
from tfmulti.config.fit_config import FitConfig, with_present_names
from tfmulti.config.run_directory import RunDir
from tfmulti.errors import ClusterError, ConfigError, UserError
from tfmulti.run import train, validation
from tfmulti.run.report import FitReport
from tfmulti.training.checkpoint import callback, owner


def train_loop(config: Mapping[str, Any]) -> FitReport:
    """Returns the report of the run that a configuration describes, when it is done.

    Give it to a `TensorflowTrainer`, whose `Result.return_value` is then the chief's report. Every
    worker calls it. `Result.checkpoint` holds the run directory: report, model, history and
    checkpoints.

    Args:
        config: the values of `FitConfig` by name. Without `run_dir` each worker has a folder of its
            own, with what Ray kept of the run. With `run_dir`, the run resumes from there, so all
            workers must see that folder, at the same absolute path.

    Raises:
        UserError: a mistake in the configuration, the data or the model, or the workers are not
            those of a `TensorflowTrainer`.
        VerificationError: replicas compute other numbers than one device.
    """
    try:
        fit_config = checked(config)
        check_cluster(fit_config)
        with run_dir_of(fit_config) as run_dir:
            shared = fit_config.shared_run_dir and fit_config.run_dir is not None
            job = validation.check(replace(fit_config, run_dir=run_dir, shared_run_dir=shared))
            report = job.done or train.run(job, RunCheckpoint)
            folder = None if fit_config.dry_run else run_dir
            tell({"epoch": report.epochs, "step": 0, **report.metrics}, folder)
        return replace(report, run_dir=fit_config.run_dir and report.run_dir)
    except UserError as error:
        # Ray shows only the first 500 characters of an error and its end, also of its traceback.
        raise error.with_traceback(None) from None


class RunCheckpoint(callback.Checkpoint):
    """Reports the metrics and the run directory to Ray at each checkpoint; for `train_loop`."""

    every_epoch = True

    def kept(self, epoch: int, step: int, logs: Mapping[str, Any]) -> None:
        """Reports a checkpoint to Ray, with the metrics; see the base class."""
        self.finish()
        tell({"epoch": epoch, "step": step, **logs}, self.folder.parent)


class Checkpoint(RunCheckpoint):
    """Keeps the checkpoints of your own loop in Ray's storage, and resumes from the newest.

        model.fit(x, y, epochs=9, callbacks=[tfmulti.ray.Checkpoint(every_s=600)])

    Every worker gives the callback to `fit`. It reports the metrics and the checkpoint to Ray after
    each epoch, and at each checkpoint within an epoch. A further call of `ray.train.report` must be
    made by all workers.

    Args:
        **options: the arguments of `tfmulti.Checkpoint`, without the folder.
    """

    def __init__(self, **options: Any) -> None:
        # The folder is removed with this object.
        self._temporary = tempfile.TemporaryDirectory(prefix="tfmulti-", dir=Path.cwd())
        copy_newest(self._temporary.name)
        super().__init__(RunDir(self._temporary.name).checkpoints, **options)

    def sees(self, token: str) -> bool:
        """Returns True, since each worker has its own folder with Ray's copy of the run.

        Args:
            token: what `token` returned on the chief.
        """
        return True


def checked(config: Mapping[str, Any]) -> FitConfig:
    """Returns the configuration of a run.

    Args:
        config: the values of `FitConfig` by name.

    Raises:
        ConfigError: a name or a value is wrong, or a folder is not absolute.
    """
    values = with_present_names(config, "train_loop_config")
    for item in fields(FitConfig):
        path = values.get(item.name)
        if item.metadata["path"] and isinstance(path, str) and not os.path.isabs(path):
            raise ConfigError(
                f"train_loop_config: {item.name} is {path!r}, but Ray starts the workers in folders"
                " of its own. Give an absolute path, or leave it out."
            )
    return FitConfig(**values)


def check_cluster(config: FitConfig) -> None:
    """Checks that the workers of Ray are those of TF_CONFIG.

    Raises:
        ClusterError: they are not.
    """
    cluster, _ = find_cluster(os.environ, config.environment)
    size, workers = cluster.size if cluster else 1, ray.train.get_context().get_world_size()
    if size != workers:
        raise ClusterError(
            f"Ray has started {workers} workers, but the environment describes {size}. Use the "
            "TensorflowTrainer of ray.train.tensorflow, which sets TF_CONFIG."
        )


@contextlib.contextmanager
def run_dir_of(config: FitConfig) -> Iterator[str]:
    """Yields the run directory, with the files of the newest checkpoint in Ray's storage.

    A directory that the configuration names is yielded as it is.
    """
    if config.run_dir is not None:
        yield config.run_dir
        return
    # The current folder belongs to Ray's session. What a killed worker leaves there is removed with
    # the session.
    with tempfile.TemporaryDirectory(prefix="tfmulti-", dir=Path.cwd()) as folder:
        copy_newest(folder)
        yield folder


def copy_newest(folder: str) -> None:
    """Copies the newest checkpoint in Ray's storage to a folder, if there is one."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return
    checkpoint.to_directory(folder)
    # The process that made the checkpoint does not own the copy.
    (RunDir(folder).checkpoints / owner.FILE).unlink(missing_ok=True)


def tell(metrics: dict[str, Any], folder: str | Path | None) -> None:
    """Reports metrics to Ray, and a folder as the checkpoint. It waits until all workers call it.

    Args:
        metrics: the metrics. Ray keeps the chief's.
        folder: the folder to store, or None. Only the chief's goes to Ray's storage.
    """
    chief = ray.train.get_context().get_world_rank() == 0
    checkpoint = ray.train.Checkpoint.from_directory(folder) if chief and folder else None
    ray.train.report(metrics, checkpoint=checkpoint)

"""Trains Keras models on many devices and machines with the same numbers as on one.

A script calls `prepare(model, options)`. The prepared model trains on the devices of the strategy
that `make_strategy` returns, and `Checkpoint` lets the training resume after a stop. `verify`
compares its first steps with those of one device. `train(FitConfig(...))` does a whole run, like
the command `python -m tfmulti.fit`: it loads the data, trains the model and writes the files of the
run. It returns a `FitReport`.

The package imports a public name when it is first used, so `import tfmulti` does not import
TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# `as` tells type checkers that the names are public.
if TYPE_CHECKING:
    from tfmulti.cluster.cluster import Cluster as Cluster
    from tfmulti.cluster.cluster import Task as Task
    from tfmulti.config.fit_config import FitConfig as FitConfig
    from tfmulti.config.training_options import TrainingOptions as TrainingOptions
    from tfmulti.data.arrays import ArraySource as ArraySource
    from tfmulti.data.data_set import DataSpec as DataSpec
    from tfmulti.data.source import Source as Source
    from tfmulti.distribution.strategies import make_strategy as make_strategy
    from tfmulti.errors import ClusterError as ClusterError
    from tfmulti.errors import ConfigError as ConfigError
    from tfmulti.errors import DataError as DataError
    from tfmulti.errors import DeviceError as DeviceError
    from tfmulti.errors import ModelError as ModelError
    from tfmulti.errors import ResumeError as ResumeError
    from tfmulti.errors import RunDirError as RunDirError
    from tfmulti.errors import TfmultiError as TfmultiError
    from tfmulti.errors import UserError as UserError
    from tfmulti.errors import VerificationError as VerificationError
    from tfmulti.launch.config import LaunchConfig as LaunchConfig
    from tfmulti.run.callbacks.live_curves import LiveCurves as LiveCurves
    from tfmulti.run.callbacks.throughput import Throughput as Throughput
    from tfmulti.run.callbacks.tracker import Tracker as Tracker
    from tfmulti.run.notebook import notebook_launcher as notebook_launcher
    from tfmulti.run.report import FitReport as FitReport
    from tfmulti.run.train import train as train
    from tfmulti.run.tuning import make_tuner as make_tuner
    from tfmulti.training.checkpoint.callback import Backup as Backup
    from tfmulti.training.checkpoint.callback import Checkpoint as Checkpoint
    from tfmulti.training.distributed_model import estimate as estimate
    from tfmulti.training.distributed_model import prepare as prepare
    from tfmulti.training.memory import MemoryEstimate as MemoryEstimate
    from tfmulti.training.verification.result import Verification as Verification
    from tfmulti.training.verification.verification import verify as verify
    from tfmulti.training.watchdog import Watchdog as Watchdog


__version__ = "0.1.0"

# The module of each public name. There is no name `launch`, because `tfmulti.launch` is a package.
# A program starts a job by `tfmulti.launch.run(LaunchConfig(...))`.
_MODULES = {
    "ArraySource": "tfmulti.data.arrays",
    "Backup": "tfmulti.training.checkpoint.callback",
    "Checkpoint": "tfmulti.training.checkpoint.callback",
    "Cluster": "tfmulti.cluster.cluster",
    "ClusterError": "tfmulti.errors",
    "ConfigError": "tfmulti.errors",
    "DataError": "tfmulti.errors",
    "DataSpec": "tfmulti.data.data_set",
    "DeviceError": "tfmulti.errors",
    "FitConfig": "tfmulti.config.fit_config",
    "FitReport": "tfmulti.run.report",
    "LaunchConfig": "tfmulti.launch.config",
    "LiveCurves": "tfmulti.run.callbacks.live_curves",
    "MemoryEstimate": "tfmulti.training.memory",
    "ModelError": "tfmulti.errors",
    "ResumeError": "tfmulti.errors",
    "RunDirError": "tfmulti.errors",
    "Source": "tfmulti.data.source",
    "Task": "tfmulti.cluster.cluster",
    "TfmultiError": "tfmulti.errors",
    "Throughput": "tfmulti.run.callbacks.throughput",
    "Tracker": "tfmulti.run.callbacks.tracker",
    "TrainingOptions": "tfmulti.config.training_options",
    "UserError": "tfmulti.errors",
    "Verification": "tfmulti.training.verification.result",
    "VerificationError": "tfmulti.errors",
    "estimate": "tfmulti.training.distributed_model",
    "make_strategy": "tfmulti.distribution.strategies",
    "make_tuner": "tfmulti.run.tuning",
    "Watchdog": "tfmulti.training.watchdog",
    "notebook_launcher": "tfmulti.run.notebook",
    "prepare": "tfmulti.training.distributed_model",
    "train": "tfmulti.run.train",
    "verify": "tfmulti.training.verification.verification",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that `import tfmulti` is fast."""
    if name not in _MODULES:
        raise AttributeError(f"module 'tfmulti' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Returns all names of the package, also the public ones that are not imported yet."""
    return sorted([*globals(), *_MODULES])

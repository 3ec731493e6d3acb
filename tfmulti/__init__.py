"""Trains Keras models on many devices and machines with the same numbers as on one."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfmulti.cluster.cluster import Cluster, Task
    from tfmulti.config.fit_config import FitConfig
    from tfmulti.data.source import Source
    from tfmulti.distribution.strategies import make_strategy
    from tfmulti.errors import TfmultiError, UserError, VerificationError
    from tfmulti.run.callbacks.throughput import Throughput
    from tfmulti.run.report import FitReport
    from tfmulti.run.train import fit
    from tfmulti.training.checkpoint.callback import Backup
    from tfmulti.training.distributed_model import prepare
    from tfmulti.training.verification.result import Verification
    from tfmulti.training.verification.verification import verify

__version__ = "0.1.0"

_PLACES = {
    "Backup": "tfmulti.training.checkpoint.callback",
    "Cluster": "tfmulti.cluster.cluster",
    "Task": "tfmulti.cluster.cluster",
    "FitConfig": "tfmulti.config.fit_config",
    "FitReport": "tfmulti.run.report",
    "TfmultiError": "tfmulti.errors",
    "UserError": "tfmulti.errors",
    "Throughput": "tfmulti.run.callbacks.throughput",
    "Source": "tfmulti.data.source",
    "fit": "tfmulti.run.train",
    "make_strategy": "tfmulti.distribution.strategies",
    "prepare": "tfmulti.training.distributed_model",
    "verify": "tfmulti.training.verification.verification",
    "Verification": "tfmulti.training.verification.result",
    "VerificationError": "tfmulti.errors",
}

__all__ = [
    "Backup",
    "Cluster",
    "FitConfig",
    "FitReport",
    "Source",
    "Task",
    "TfmultiError",
    "Throughput",
    "UserError",
    "Verification",
    "VerificationError",
    "fit",
    "make_strategy",
    "prepare",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that `import tfmulti` costs nothing."""
    if name not in _PLACES:
        raise AttributeError(f"module 'tfmulti' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])

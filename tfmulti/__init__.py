"""Trains Keras models on many devices and machines with the same numbers as on one."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfmulti.callbacks.backup import Backup
    from tfmulti.callbacks.throughput import Throughput
    from tfmulti.cluster import Cluster, Task
    from tfmulti.config import FitConfig
    from tfmulti.errors import TfmultiError, UserError, VerificationError
    from tfmulti.loop import fit
    from tfmulti.report import FitReport
    from tfmulti.sources.source import Source
    from tfmulti.strategies import make_strategy
    from tfmulti.trainer import prepare
    from tfmulti.verification import verify
    from tfmulti.verification_result import Verification

__version__ = "0.1.0"

_PLACES = {
    "Backup": "tfmulti.callbacks.backup",
    "Cluster": "tfmulti.cluster",
    "Task": "tfmulti.cluster",
    "FitConfig": "tfmulti.config",
    "FitReport": "tfmulti.report",
    "TfmultiError": "tfmulti.errors",
    "UserError": "tfmulti.errors",
    "Throughput": "tfmulti.callbacks.throughput",
    "Source": "tfmulti.sources.source",
    "fit": "tfmulti.loop",
    "make_strategy": "tfmulti.strategies",
    "prepare": "tfmulti.trainer",
    "verify": "tfmulti.verification",
    "Verification": "tfmulti.verification_result",
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

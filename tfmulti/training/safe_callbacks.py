"""Makes callbacks that write files, or to a server, safe for several workers.

No callback of Keras knows of workers. In one shared folder ModelCheckpoint crashes on the lock of
HDF5, CSVLogger writes each row once for each worker, and TensorBoard makes a file for each worker.
The callbacks of MLflow and W&B make a run for each worker. A callback of the user's own that writes
has the attribute `chief_only = True`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from tfmulti.config.trackers import TENSORBOARD, TRACKERS
from tfmulti.distribution.strategies import Placement
from tfmulti.errors import ModelError
from tfmulti.training.checkpoint.callback import callbacks_in

_CHIEF_ONLY = (
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
)
# On every worker these write the same files.
_OF_ONE_PROCESS = (keras.callbacks.BackupAndRestore, keras.callbacks.OrbaxCheckpoint)
# Packages whose callbacks do nothing but write. They are known by name, so none is imported here.
_PACKAGES = frozenset(TRACKERS) - {TENSORBOARD}


def worker_safe(callbacks: Any, placement: Placement) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that this worker runs.

    The chief runs all of them. The other workers run those that do more than write. ModelCheckpoint
    runs on every worker, because saving may need all workers (`saving_elsewhere`).

    Args:
        callbacks: one callback or several, as `fit` takes them; None is left out.
        placement: this process' place among the workers.

    Raises:
        ModelError: there are several workers, and a callback is BackupAndRestore or
            OrbaxCheckpoint. They cannot be made safe, because each worker writes the same files.
    """
    all_callbacks = callbacks_in(callbacks)
    if placement.workers == 1:
        return all_callbacks
    for callback in all_callbacks:
        if isinstance(callback, _OF_ONE_PROCESS):
            raise ModelError(
                f"{type(callback).__name__} does not work with several workers: each one writes "
                "the same files. Use tfmulti.Backup(folder) instead: the chief writes, and all "
                "workers go on from it."
            )
    if placement.is_chief:
        return all_callbacks
    return [callback for callback in all_callbacks if not _is_for_chief(callback)]


def _is_for_chief(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback does nothing but write, so that only the chief runs it."""
    if getattr(callback, "chief_only", False) or isinstance(callback, _CHIEF_ONLY):
        return True
    return any(kind.__module__.split(".")[0] in _PACKAGES for kind in type(callback).__mro__)


@contextlib.contextmanager
def saving_elsewhere(
    callbacks: Iterable[keras.callbacks.Callback], placement: Placement
) -> Iterator[None]:
    """Lets ModelCheckpoint write to a temporary folder inside the context, except on the chief.

    When the context ends, the folder is removed, and the callbacks get back the paths that they
    were given.
    """
    checkpoints = [c for c in callbacks if isinstance(c, keras.callbacks.ModelCheckpoint)]
    if placement.is_chief or not checkpoints:
        yield
        return
    paths = [checkpoint.filepath for checkpoint in checkpoints]
    with tempfile.TemporaryDirectory(prefix="tfmulti-not-chief-") as folder:
        for checkpoint, path in zip(checkpoints, paths, strict=True):
            subfolder = tempfile.mkdtemp(dir=folder)
            checkpoint.filepath = os.path.join(subfolder, os.path.basename(path))
        try:
            yield
        finally:
            for checkpoint, path in zip(checkpoints, paths, strict=True):
                checkpoint.filepath = path

"""Keras' callbacks that write files, made safe where several workers share a folder.

No callback of Keras knows of workers: in one shared folder ModelCheckpoint crashes on
HDF5's lock, CSVLogger writes each row once a worker and TensorBoard makes a file a worker.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterable
from typing import Any

import keras

from tfmulti.errors import ModelError
from tfmulti.strategies import Placement

_CHIEF_ONLY = (
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
)


def worker_safe(callbacks: Any, placement: Placement) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that this worker runs. Every worker calls it.

    On the chief: all as given. On the others: without those that only write, and with
    ModelCheckpoint writing to a folder of its own that is thrown away, since saving may need
    every worker.

    Raises:
        ModelError: BackupAndRestore with several workers, which cannot be made safe.
    """
    given = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
    given = [callback for callback in given if callback is not None]
    if placement.workers == 1:
        return given
    for callback in given:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ModelError(
                "BackupAndRestore does not work with several workers: each one writes the same "
                "files. Use tfmulti.Backup(folder) instead: the chief writes, and all workers go "
                "on from it."
            )
    if placement.is_chief:
        return given
    kept = [callback for callback in given if not isinstance(callback, _CHIEF_ONLY)]
    for callback in kept:
        if isinstance(callback, keras.callbacks.ModelCheckpoint):
            _redirect(callback)
    return kept


def _redirect(checkpoint: keras.callbacks.ModelCheckpoint) -> None:
    folder = tempfile.mkdtemp(prefix="tfmulti-not-chief-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    checkpoint.filepath = os.path.join(folder, os.path.basename(checkpoint.filepath))

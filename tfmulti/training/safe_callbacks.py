"""Keras' callbacks that write files, made safe where several workers share a folder.

No callback of Keras knows of workers: in one shared folder ModelCheckpoint crashes on
HDF5's lock, CSVLogger writes each row once a worker and TensorBoard makes a file a worker.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from tfmulti.distribution.strategies import Placement
from tfmulti.errors import ModelError

_CHIEF_ONLY = (
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
)


def worker_safe(callbacks: Any, placement: Placement) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that this worker runs. Every worker calls it.

    On the chief: all as given. On the others: without those that only write. ModelCheckpoint
    saves there, too, since saving may need every worker: see `saving_elsewhere`.

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
                "files. Use tfmulti.Checkpoint(folder) instead: the chief writes, and all workers "
                "go "
                "on from it."
            )
    if placement.is_chief:
        return given
    return [callback for callback in given if not isinstance(callback, _CHIEF_ONLY)]


@contextlib.contextmanager
def saving_elsewhere(
    callbacks: Iterable[keras.callbacks.Callback], placement: Placement
) -> Iterator[None]:
    """Inside, ModelCheckpoint saves to a folder that is thrown away, on all workers but the chief.

    Afterwards the user's callbacks have the paths that they were given.
    """
    if placement.is_chief:
        yield
        return
    found = [c for c in callbacks if isinstance(c, keras.callbacks.ModelCheckpoint)]
    paths = [checkpoint.filepath for checkpoint in found]
    with tempfile.TemporaryDirectory(prefix="tfmulti-not-chief-") as folder:
        for number, (checkpoint, path) in enumerate(zip(found, paths, strict=True)):
            own = os.path.join(folder, str(number))
            os.mkdir(own)
            checkpoint.filepath = os.path.join(own, os.path.basename(path))
        try:
            yield
        finally:
            for checkpoint, path in zip(found, paths, strict=True):
                checkpoint.filepath = path

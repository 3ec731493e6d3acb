"""Saves model.keras during a run, so that a killed run leaves a model. Runs on the chief."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from tfmulti.config.run_directory import replacing

# Two saves are at least this far apart.
EVERY_S = 5.0
# The largest part of the run that is spent on saving.
MOST_OF_TIME = 1 / 20


def save_model(model: keras.Model, path: Path) -> None:
    """Writes a .keras file, which Keras loads on one device without tfmulti."""
    with replacing(path) as partial:
        model.save(partial)


class ModelFile(keras.callbacks.Callback):
    """Saves the model at the end of an epoch, if the last save was long enough ago.

    The interval is `EVERY_S` seconds, or longer if the model takes long to save. A run that ends
    normally saves the model again, so this file matters only until then.

    Args:
        path: the file.
        clock: returns seconds.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._path, self._clock = path, clock
        self._last = clock()
        self._wait_s = EVERY_S

    def get_state(self) -> dict[str, Any]:
        """Returns nothing, because the callback only counts the time of this process."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Does nothing, because `get_state` returns nothing."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves the model if the last save was long enough ago."""
        started = self._clock()
        if started - self._last < self._wait_s:
            return
        save_model(self.model, self._path)
        self._last = self._clock()
        self._wait_s = max(EVERY_S, (self._last - started) / MOST_OF_TIME)

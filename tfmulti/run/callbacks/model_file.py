"""model.keras while the run goes on, so that an end by force leaves one. Runs on the chief."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from tfmulti.config.run_directory import replacing

EVERY_S = 5.0  # as long as a Ctrl-C may take
MOST_OF_TIME = 1 / 20  # of the run spent saving


def save_model(model: keras.Model, path: Path) -> None:
    """Writes a .keras file that plain Keras loads on one device."""
    with replacing(path) as partial:
        model.save(partial)


class ModelFile(keras.callbacks.Callback):
    """Saves the model at the end of an epoch, where the last time was long enough ago.

    That is `EVERY_S` seconds, or longer for a model that takes long to save. A run that ends
    in its own time saves the model once more, so what this leaves is there only in between.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._path, self._clock = path, clock
        self._last = clock()
        self._wait_s = EVERY_S

    def get_state(self) -> dict[str, Any]:
        """Returns nothing: what it counts is this process' time."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Does nothing; see `get_state`."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        started = self._clock()
        if started - self._last < self._wait_s:
            return
        save_model(self.model, self._path)
        self._last = self._clock()
        self._wait_s = max(EVERY_S, (self._last - started) / MOST_OF_TIME)

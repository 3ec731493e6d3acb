"""Keras' TensorBoard callback, for metrics of any shape. Runs on the chief."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras


class TensorBoard(keras.callbacks.TensorBoard):
    """Writes scalar metrics; vectors (an F1 score a class), at which Keras' fails, are left out."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), write_graph=False)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, _scalars(logs))

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        super().on_test_end(_scalars(logs))


def _scalars(logs: dict[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (logs or {}).items() if not isinstance(value, list)}

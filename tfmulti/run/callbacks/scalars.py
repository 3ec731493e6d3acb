"""`WritesScalars`: the base of callbacks that write figures of their own for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfmulti.config.run_directory import check_guards


class WritesScalars(keras.callbacks.Callback):
    """Writes scalars for TensorBoard, and keeps nothing in checkpoints.

    Args:
        folder: the folder for TensorBoard, or None to write nothing. The files are made when the
            first scalar is written.
    """

    def __init__(self, folder: str | Path | None) -> None:
        super().__init__()
        self._folder = folder
        self._writer: Any = None

    def write_scalars(self, epoch: int, values: Mapping[str, float]) -> None:
        """Writes scalars by their names in TensorBoard."""
        if self._folder is None:
            return
        check_guards(Path(self._folder))
        if self._writer is None:
            self._writer = tf.summary.create_file_writer(str(self._folder))
        with self._writer.as_default(step=epoch):
            for name, value in values.items():
                tf.summary.scalar(name, value)

    def get_state(self) -> dict[str, Any]:
        """Returns nothing, because the figures are of this process. Writes events to the disk."""
        if self._writer is not None:
            self._writer.flush()
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Does nothing, because `get_state` returns nothing."""

    def on_train_end(self, logs: Any = None) -> None:
        """Closes the files for TensorBoard."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

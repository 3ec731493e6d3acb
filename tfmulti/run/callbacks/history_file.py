"""Writes history.csv, which has one row for each epoch. Runs on the chief."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfmulti.config.run_directory import remove, write_text


def listed(value: Any) -> Any:
    """Returns a metric that is an array as a list, and any other one as it is."""
    return value.tolist() if isinstance(value, np.ndarray) else value


class HistoryFile(keras.callbacks.Callback):
    """Writes the epoch, the metrics and the learning rate to a CSV file after each epoch.

    Args:
        path: the file. Each write replaces it as a whole.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._rows: list[dict[str, Any]] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the row of the epoch, and writes the file."""
        rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        metrics = {name: listed(value) for name, value in (logs or {}).items()}
        row = {"epoch": epoch + 1, **metrics, "learning_rate": rate}
        self._rows.append(row)
        self._write()

    def get_state(self) -> dict[str, Any]:
        """Returns the rows of the finished epochs, for a checkpoint."""
        return {"rows": list(self._rows)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Writes the file as it was at the checkpoint, because later epochs are trained again."""
        self._rows = list(state["rows"])
        if self._rows:
            self._write()
        else:
            remove(self._path)

    def _write(self) -> None:
        """Writes all rows."""
        names = list(dict.fromkeys(name for r in self._rows for name in r))
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        write_text(self._path, text.getvalue())

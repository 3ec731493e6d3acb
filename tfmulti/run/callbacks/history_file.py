"""history.csv: one row an epoch, each write whole. Runs on the chief."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import keras

from tfmulti.config.run_directory import remove, write_text


class HistoryFile(keras.callbacks.Callback):
    """Writes epoch, metrics and learning rate to a CSV file at the end of each epoch."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._rows: list[dict[str, Any]] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        row = {"epoch": epoch + 1, **(logs or {}), "learning_rate": rate}
        self._rows.append(row)
        self._write()

    def get_state(self) -> dict[str, Any]:
        """Returns the rows so far, for a checkpoint."""
        return {"rows": list(self._rows)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Writes the file as it was at the checkpoint: later epochs are trained again."""
        self._rows = list(state["rows"])
        if self._rows:
            self._write()
        else:
            remove(self._path)

    def _write(self) -> None:
        names = list(dict.fromkeys(name for r in self._rows for name in r))
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        write_text(self._path, text.getvalue())

"""`LiveCurves` shows the metrics of a training in a notebook while it goes on."""

from __future__ import annotations

from typing import Any

import keras

from tfmulti.config.notebook_output import NotebookOutput, in_notebook
from tfmulti.run.artifacts import curves_svg


class LiveCurves(keras.callbacks.Callback):
    """Draws the metrics over the epochs in the output of the cell, anew after each epoch.

    It works in a notebook's kernel and in the workers of `notebook_launcher`, where the chief's
    curves are shown. Elsewhere, as in a script, it does nothing.

        model.fit(x, y, epochs=20, callbacks=[tfmulti.LiveCurves()])
    """

    chief_only = True

    def __init__(self) -> None:
        super().__init__()
        self._output = NotebookOutput()
        self._history: dict[str, list[float]] = {}

    def get_state(self) -> dict[str, Any]:
        """Returns the metrics so far, for a checkpoint."""
        return {"history": self._history}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on with the curves of a checkpoint."""
        self._history = {name: list(values) for name, values in state["history"].items()}

    def on_train_begin(self, logs: Any = None) -> None:
        """Takes a place in the output, before the progress bar."""
        self._output.show("")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the metrics of the epoch, and draws the curves again."""
        if not in_notebook():
            return
        for name, value in (logs or {}).items():
            # Metrics that are vectors, such as an F1 score for each class, are no curve.
            if isinstance(value, float):
                self._history.setdefault(name, []).append(value)
        self._output.show(curves_svg(self._history))

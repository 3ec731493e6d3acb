"""`LiveCurves` shows the metrics of a training in a notebook while it goes on."""

from __future__ import annotations

from typing import Any

import keras

from tfmulti.config.notebook_output import NotebookOutput, in_notebook
from tfmulti.run.curves import curves_svg

# A picture of more curves cannot be read.
_MOST_NAMES = 64


class LiveCurves(keras.callbacks.Callback):
    """Shows the progress and the curves of the metrics in the output of the cell.

    They are drawn anew after each epoch.

    It works in a notebook's kernel and in the workers of `notebook_launcher`, where the chief's
    curves are shown. Elsewhere, as in a script, it does nothing. It draws at most 64 metrics.

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
        """Goes on with the curves of a checkpoint.

        Args:
            state: what `get_state` returned.

        Raises:
            ValueError: `state` has another form.
        """
        history = state["history"]
        if not isinstance(history, dict) or len(history) > _MOST_NAMES:
            raise ValueError(
                f"the history of LiveCurves is not a dict of at most {_MOST_NAMES} lists"
            )
        for name, values in history.items():
            is_curve = isinstance(values, list) and all(type(value) is float for value in values)
            if not isinstance(name, str) or not is_curve:
                raise ValueError(f"the curve {name!r:.40} of LiveCurves is not a list of floats")
        self._history = {name: list(values) for name, values in history.items()}

    def on_train_begin(self, logs: Any = None) -> None:
        """Takes a place in the output, before the progress bar."""
        self._output.show("")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the metrics of the epoch, and draws the curves again."""
        if not in_notebook():
            return
        for name, value in (logs or {}).items():
            # Metrics that are vectors, such as an F1 score for each class, are no curve.
            # np.float64 derives from float, but a checkpoint must hold plain floats.
            if isinstance(value, float) and (
                name in self._history or len(self._history) < _MOST_NAMES
            ):
                self._history.setdefault(name, []).append(float(value))
        self._output.show(self._progress(epoch + 1) + curves_svg(self._history))

    def _progress(self, done: int) -> str:
        """Returns a bar of the epochs that have ended, as HTML."""
        count = (self.params or {}).get("epochs", done)
        bar = f'<progress value="{done}" max="{count}"></progress>'
        return f"<div>{bar} {done} of {count} epochs</div>"

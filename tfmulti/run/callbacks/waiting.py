"""Measures how long the steps wait for data, and says what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfmulti.data.advice import HIGH_SHARE, advice
from tfmulti.data.loader import cores
from tfmulti.run.callbacks.scalars import WritesScalars
from tfmulti.training.state.trainer_state import state_of


class Waiting(WritesScalars):
    """Measures the share of the time of the steps in which they waited for data.

    The share is the mean over all replicas. It does not include the first execution, which is
    traced. The callback runs on every worker.

    Args:
        folder: the folder in which the share of each epoch is written for TensorBoard, as
            `data/waiting_share`, or None.
        say: prints a line. It is called at the end of an epoch with much waiting.
        cached: whether the examples are kept in a cache.
    """

    def __init__(
        self,
        folder: Path | None = None,
        say: Callable[[str, str], None] | None = None,
        *,
        cached: bool = False,
    ) -> None:
        super().__init__(folder)
        self.seconds = 0.0
        self.waited_s = 0.0
        self._say, self._cached = say, cached

    @property
    def share(self) -> float:
        """The share of the time of all steps that was waiting, from 0 to 1."""
        return min(1.0, self.waited_s / self.seconds) if self.seconds else 0.0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes the share of the epoch, and prints advice if it is large."""
        state = state_of(self.model)
        self.seconds += state.epoch.seconds
        self.waited_s += state.epoch.waited_s
        if not state.epoch.seconds:
            return
        share = min(1.0, state.epoch.waited_s / state.epoch.seconds)
        self.write_scalars(epoch, {"data/waiting_share": share})
        if self._say is not None and share > HIGH_SHARE:
            self._say(
                "waiting",
                advice(share, state.epoch.reader_threads, cached=self._cached, cores=cores()),
            )

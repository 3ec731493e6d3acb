"""Says how much of the steps' time went by without data, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfmulti.data.advice import MUCH, advice
from tfmulti.data.loader import cores
from tfmulti.training.state.trainer_state import state_of


class Waiting(keras.callbacks.Callback):
    """Measures the share of the steps' time in which they waited for data; on every worker.

    The mean over all replicas; the first execution, which is traced, is left out. With a
    folder, each epoch's share goes to TensorBoard there, as `data/waiting_share`.

    Args:
        folder: where TensorBoard's events go, or None.
        say: prints a line; is called at the end of an epoch with much waiting.
        cached: whether the examples are kept after they were read once.
    """

    def __init__(
        self,
        folder: Path | None = None,
        say: Callable[[str, str], None] | None = None,
        *,
        cached: bool = False,
    ) -> None:
        super().__init__()
        self.seconds = 0.0
        self.waited_s = 0.0
        self._folder, self._say, self._cached = folder, say, cached
        self._writer: Any = None

    @property
    def share(self) -> float:
        """The part of all steps' time that was waiting, 0 to 1."""
        return min(1.0, self.waited_s / self.seconds) if self.seconds else 0.0

    def get_state(self) -> dict[str, Any]:
        """Returns nothing, for what it measures is this process; writes what it has to the disk."""
        if self._writer is not None:
            self._writer.flush()
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Does nothing; see `get_state`."""

    def on_train_begin(self, logs: Any = None) -> None:
        if self._folder is not None:
            self._writer = tf.summary.create_file_writer(str(self._folder))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        state = state_of(self.model)
        self.seconds += state.epoch.seconds
        self.waited_s += state.epoch.waited_s
        if not state.epoch.seconds:
            return
        share = min(1.0, state.epoch.waited_s / state.epoch.seconds)
        if self._writer is not None:
            with self._writer.as_default(step=epoch):
                tf.summary.scalar("data/waiting_share", share)
        if self._say is not None and share > MUCH:
            self._say(
                "waiting",
                advice(share, state.epoch.reader_threads, cached=self._cached, cores=cores()),
            )

    def on_train_end(self, logs: Any = None) -> None:
        if self._writer is not None:
            self._writer.close()

"""Names the worker for which the others wait in every step, while the run goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfmulti.distribution.agreement import gather
from tfmulti.distribution.connections import made_channel
from tfmulti.distribution.strategies import placement_of
from tfmulti.run.straggler import Straggler, straggler_of
from tfmulti.training.state.trainer_state import state_of

# A shorter epoch tells nothing.
_LEAST_S, _LEAST_EXECUTIONS = 1.0, 10


class Stragglers(keras.callbacks.Callback):
    """Finds out for which worker the others wait, at the end of each epoch.

    Every worker must have it, because the workers compare their times by a collective. The figures
    need tfmulti's own collectives, so there are none on GPUs, where NCCL connects the workers.

    Args:
        folder: the folder in which the chief writes `straggler/worker` and `straggler/slowdown` for
            TensorBoard, or None.
        say: prints a line.

    Attributes:
        found: what stood out in the last epoch that was long enough, or None.
        others_share: the share of the time of all steps in which this worker waited for messages of
            other workers, or None if it is not known.
    """

    def __init__(self, folder: Path | None, say: Callable[[str, str], None]) -> None:
        super().__init__()
        self.found: Straggler | None = None
        self.others_share: float | None = None
        self._all_s = self._all_waited_s = 0.0
        self._folder, self._say = folder, say
        self._told: tuple[str, int | None] | None = None
        self._writer: Any = None
        self._waited_s = self._before_s = 0.0
        self._executions = 0

    def get_state(self) -> dict[str, Any]:
        """Returns nothing, because the times are of this process. Writes events to the disk."""
        if self._writer is not None:
            self._writer.flush()
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Does nothing, because `get_state` returns nothing."""

    def on_train_begin(self, logs: Any = None) -> None:
        """Opens the file for TensorBoard."""
        self._channel = made_channel(placement_of(self.model.distribute_strategy))
        self._is_traced = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins to count."""
        self._waited_s, self._executions = 0.0, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Notes how long this worker has waited for others before the execution."""
        if self._channel is not None:
            self._before_s = self._channel.waited_s

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts how long the execution has waited for others."""
        if self._channel is None:
            # The first execution connects the workers.
            self._channel = made_channel(placement_of(self.model.distribute_strategy))
        elif self._is_traced:
            self._waited_s += self._channel.waited_s - self._before_s
            self._executions += 1
        # The first execution is traced, and does not count in the times of the steps either.
        self._is_traced = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Compares the workers, and prints a line if another worker stands out than before."""
        place = placement_of(self.model.distribute_strategy)
        if place.workers == 1:
            return
        times = state_of(self.model).epoch
        self._all_s += times.seconds
        self._all_waited_s += self._waited_s
        if self._channel is not None and self._all_s:
            self.others_share = min(1.0, self._all_waited_s / self._all_s)
        own = (times.seconds, times.own_waited_s, self._waited_s, float(self._executions))
        microseconds = gather(self.model.distribute_strategy, [round(1e6 * each) for each in own])
        seconds, for_data, for_others, executions = (
            [each / 1e6 for each in column] for column in zip(*microseconds, strict=True)
        )
        if min(seconds) < _LEAST_S or min(executions) < _LEAST_EXECUTIONS or not any(for_others):
            return
        self.found = straggler_of(seconds, for_data, for_others, place.addresses)
        now = (self.found.cause, self.found.worker) if self.found else None
        if self.found is not None and now != self._told:
            self._say("straggler", self.found.words())
        self._told = now
        if self._folder is not None:
            self._write(epoch)

    def _write(self, epoch: int) -> None:
        """Writes the figures of an epoch for TensorBoard."""
        if self._writer is None:
            self._writer = tf.summary.create_file_writer(str(self._folder))
        worker = None if self.found is None else self.found.worker
        with self._writer.as_default(step=epoch):
            tf.summary.scalar("straggler/worker", -1 if worker is None else worker)
            tf.summary.scalar("straggler/slowdown", self.found.slowdown if self.found else 1.0)

    def on_train_end(self, logs: Any = None) -> None:
        """Closes the file for TensorBoard."""
        if self._writer is not None:
            self._writer.close()

    def as_dict(self) -> dict[str, Any] | None:
        """Returns what stood out in the last epoch, for report.json."""
        return None if self.found is None else dataclasses.asdict(self.found)

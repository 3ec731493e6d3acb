"""Measures how fast the training goes, the validation and the first call left out."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfmulti.stopping import state_of


class Throughput(keras.callbacks.Callback):
    """Counts examples and seconds of the training steps; runs on every worker.

    The first execution traces and compiles, so it counts in `first_s` alone. With a folder,
    the figures of each epoch go to TensorBoard there.

    Args:
        replicas: all devices, for the figure a device.
        folder: where TensorBoard's events go, or None.
        clock: returns seconds.
    """

    def __init__(
        self,
        replicas: int,
        folder: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self.first_s = 0.0
        self.seconds = 0.0
        self.examples = 0
        self.steps = 0
        self._replicas, self._folder, self._clock = replicas, folder, clock
        self._started = 0.0
        self._before = (0, 0)
        self._epoch = (0.0, 0, 0)
        self._writer: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        if self._folder is not None:
            self._writer = tf.summary.create_file_writer(str(self._folder))

    def get_state(self) -> dict[str, Any]:
        """Returns nothing, for what it measures is this process; writes what it has to the disk."""
        if self._writer is not None:
            self._writer.flush()
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Does nothing; see `get_state`."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._started = self._clock()
        state = state_of(self.model)
        self._before = (state.examples, state.steps)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        seconds = self._clock() - self._started
        if not self.first_s:
            self.first_s = seconds
            return
        state = state_of(self.model)
        self.seconds += seconds
        self.examples += state.examples - self._before[0]
        self.steps += state.steps - self._before[1]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        seconds, examples, steps = (
            now - before
            for now, before in zip(
                (self.seconds, self.examples, self.steps), self._epoch, strict=True
            )
        )
        self._epoch = (self.seconds, self.examples, self.steps)
        if self._writer is None or not seconds:
            return
        with self._writer.as_default(step=epoch):
            tf.summary.scalar("throughput/examples_per_sec", examples / seconds)
            tf.summary.scalar(
                "throughput/device/examples_per_sec", examples / seconds / self._replicas
            )
            tf.summary.scalar("throughput/steps_per_sec", steps / seconds)

    def on_train_end(self, logs: Any = None) -> None:
        if self._writer is not None:
            self._writer.close()

    @property
    def examples_per_second(self) -> float:
        """Training examples a second after the first execution; 0 where there was only one."""
        return self.examples / self.seconds if self.seconds else 0.0

    @property
    def step_s(self) -> float:
        """Seconds of one step after the first execution."""
        return self.seconds / self.steps if self.steps else self.first_s

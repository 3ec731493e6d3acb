"""Measures the seconds of an epoch's steps, and how long the steps waited for data."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmulti.training.input.interface import Feed
from tfmulti.training.state.trainer_state import EpochTimes, TrainerState
from tfmulti.training.step.step_result import StepResult


class StepClock:
    """Measures the seconds of an epoch's steps, and how long the steps waited for data.

    The first execution of `fit` is traced, so it does not count. An execution returns its waiting
    time as a tensor. The clock reads this tensor only when the next execution has ended, so that
    the loop does not wait for the result.

    Attributes:
        period_s: the seconds from the end of the execution before the last one to the end of the
            last one.
        inside_s: the part of `period_s` that the last execution itself took.
    """

    def __init__(self) -> None:
        self._traced = False
        self.period_s = self.inside_s = 0.0

    def begin(self) -> None:
        """Starts the measurement of an epoch."""
        self._seconds = self._waited_s = self._own_waited_s = self._outside_s = 0.0
        self._unread: tf.Tensor | None = None
        self._began = time.perf_counter()

    def waiting(self, take_source: Callable[[], Any]) -> Any:
        """Returns what a function returns, and counts its time as waiting for data."""
        began = time.perf_counter()
        source = take_source()
        self._outside_s += time.perf_counter() - began
        return source

    def start(self) -> None:
        """Marks the begin of an execution."""
        self._started = time.perf_counter()

    def add(self, result: StepResult) -> None:
        """Counts an execution that has just ended."""
        now = time.perf_counter()
        self.period_s, self.inside_s = now - self._began, now - self._started
        if self._traced:
            self._seconds += now - self._began
            self._read()
            self._waited_s += self._outside_s
            self._own_waited_s += self._outside_s
            self._unread = result.waits_s
        self._traced, self._began, self._outside_s = True, now, 0.0

    def _read(self) -> None:
        """Reads the waiting times of the execution before."""
        if self._unread is None:
            return
        waited_s, own_waited_s = self._unread.numpy()
        self._waited_s += float(waited_s)
        self._own_waited_s += float(own_waited_s)
        self._unread = None

    def stop(self, state: TrainerState, feed: Feed) -> None:
        """Stores the seconds of the epoch so far, and the reader threads, in the model's state."""
        self._read()
        threads = None if feed.reader is None else feed.reader.threads
        state.epoch = EpochTimes(self._seconds, self._waited_s, self._own_waited_s, threads)

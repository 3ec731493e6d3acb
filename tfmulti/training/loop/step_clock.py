"""The seconds of an epoch's steps, and those of them that went by without data."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tfmulti.training.input.feed import Feed
from tfmulti.training.state.trainer_state import TrainerState
from tfmulti.training.step.step_result import StepResult


class StepClock:
    """The seconds of an epoch's steps, and those of them that went by without data.

    The first execution of all, which is traced, counts in neither. What an execution says is
    read when the next one has ended, so that nobody waits for it.

    `period_s` are the seconds from the end of the execution before the last to the last one's
    end, `inside_s` those of them that the last itself took.
    """

    def __init__(self) -> None:
        self._traced = False
        self.period_s = self.inside_s = 0.0

    def begin(self) -> None:
        """Begins an epoch."""
        self._seconds = self._waited_s = self._outside_s = 0.0
        self._unread: Any = 0.0
        self._began = time.perf_counter()

    def waiting(self, take: Callable[[], Any]) -> Any:
        """Returns what `take` returns, and counts the time that it took."""
        began = time.perf_counter()
        taken = take()
        self._outside_s += time.perf_counter() - began
        return taken

    def start(self) -> None:
        """Says that an execution begins."""
        self._started = time.perf_counter()

    def add(self, outcome: StepResult) -> None:
        """Counts an execution that has just ended."""
        now = time.perf_counter()
        self.period_s, self.inside_s = now - self._began, now - self._started
        if self._traced:
            self._seconds += now - self._began
            self._waited_s += float(self._unread) + self._outside_s
            self._unread = outcome.waited_s
        self._traced, self._began, self._outside_s = True, now, 0.0

    def stop(self, state: TrainerState, feed: Feed) -> None:
        """Notes the seconds of the epoch, and who read its data."""
        state.reader_threads = feed.threads
        state.epoch_s, state.waited_s = self._seconds, self._waited_s + float(self._unread)

"""Measures when the steps of a side of `benchmarks.compare` end."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any


class StepClock:
    """Notes the end of each step, or of several at a time."""

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self._ends: list[tuple[int, float]] = []

    def callback(self, keras: Any) -> Any:
        """Returns a callback of Keras 3 or tf_keras that notes the end of each batch."""
        return keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: self.end(batch + 1)
        )

    def end(self, steps: int) -> None:
        """Notes that this number of steps has ended since training began."""
        self._ends.append((steps, time.perf_counter()))

    def figures(self) -> dict[str, float]:
        """Returns the figures up to now.

        `step_ms` is the median of the timed steps, and `mean_ms` is their mean. The steps of one
        call have equal times. `start_s` is the time from the start of the process to the end of the
        first step, with imports and tracing. `after_s` is the time since the end of the last step.
        """
        now = time.perf_counter()
        timed = [end for end in self._ends if end[0] >= self._warm_up]
        pairs = list(itertools.pairwise(timed))
        step_s = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs for _ in range(b[0] - a[0])]
        return {
            "step_ms": 1000 * statistics.median(step_s),
            "mean_ms": 1000 * (timed[-1][1] - timed[0][1]) / (timed[-1][0] - timed[0][0]),
            "start_s": self._ends[0][1] - now + _age_s(),
            "after_s": now - self._ends[-1][1],
        }

    def print(self) -> None:
        """Prints the figures as a line of JSON."""
        print(json.dumps(self.figures()), flush=True)


def _age_s() -> float:
    """Returns how long this process has lived (Linux: proc(5), field 22 of stat)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")

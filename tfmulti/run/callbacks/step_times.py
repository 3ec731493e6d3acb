"""Keeps the seconds of each step, and computes percentiles of them."""

from __future__ import annotations

import bisect
import math
from array import array

PERCENTILES = (50, 90, 99)


class StepTimes:
    """The seconds of steps, sorted, with eight bytes for each step.

    >>> times = StepTimes()
    >>> times.add(0.3, steps=1)
    >>> times.add(0.4, steps=4)
    >>> times.percentile(50), times.percentile(90)
    (0.1, 0.3)
    """

    def __init__(self) -> None:
        self._sorted = array("d")

    def __len__(self) -> int:
        """Returns the number of steps."""
        return len(self._sorted)

    def add(self, seconds: float, steps: int) -> None:
        """Adds the steps of an execution, and divides its seconds evenly among them."""
        step_s = seconds / steps
        index = bisect.bisect_right(self._sorted, step_s)
        self._sorted[index:index] = array("d", [step_s]) * steps

    def merge(self, other: StepTimes) -> None:
        """Adds all steps of another object."""
        self._sorted = array("d", sorted([*self._sorted, *other._sorted]))

    def percentile(self, percent: float) -> float:
        """Returns the seconds that at least so many percent of the steps do not exceed.

        The result is the time of one step, by the nearest-rank method without interpolation. It is
        0 without steps.

        Args:
            percent: from 0 to 100.
        """
        if not self._sorted:
            return 0.0
        rank = math.ceil(percent / 100 * len(self._sorted))
        return self._sorted[max(rank, 1) - 1]

    def percentiles_ms(self) -> dict[str, float]:
        """Returns the percentiles in milliseconds by the names `p50`, `p90` and `p99`."""
        return {f"p{percent}": 1000 * self.percentile(percent) for percent in PERCENTILES}

"""How long steps take: the seconds of each, and their percentiles."""

from __future__ import annotations

import bisect
import math
from array import array

PERCENTILES = (50, 90, 99)


class StepTimes:
    """The seconds of steps, in order of size: eight bytes a step.

    >>> times = StepTimes()
    >>> times.add(0.3, steps=1)
    >>> times.add(0.4, steps=4)
    >>> times.percentile(50), times.percentile(90)
    (0.1, 0.3)
    """

    def __init__(self) -> None:
        self._sorted = array("d")

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, seconds: float, steps: int) -> None:
        """Adds an execution of some steps; each of them took its part of the time."""
        each = seconds / steps
        place = bisect.bisect_right(self._sorted, each)
        self._sorted[place:place] = array("d", [each]) * steps

    def merge(self, other: StepTimes) -> None:
        """Adds all steps of another one."""
        self._sorted = array("d", sorted([*self._sorted, *other._sorted]))

    def percentile(self, percent: float) -> float:
        """Returns the seconds that so many percent of the steps do not exceed: one step's own.

        The nearest rank, without interpolation; 0 where there is no step.
        """
        if not self._sorted:
            return 0.0
        rank = math.ceil(percent / 100 * len(self._sorted))
        return self._sorted[max(rank, 1) - 1]

    def percentiles_ms(self) -> dict[str, float]:
        """Returns p50, p90 and p99 in milliseconds, by these names."""
        return {f"p{percent}": 1000 * self.percentile(percent) for percent in PERCENTILES}

"""Chooses how many steps one call into TensorFlow takes, from the costs of steps and calls.

Each call costs time besides its steps. Calls with more steps save most of this cost, but an
execution of several steps must be compiled first. If a call costs `c` seconds and `n` steps are
left, `k` steps in each call save this time:

    saved = c * (1 - 1 / k) * n

`k` is the number of steps that take about `TARGET_S`. It is used if it saves more time than the
compilation takes.
"""

from __future__ import annotations

import statistics

# The time that a call should take. The progress bar then moves ten times a second, and a stop takes
# no longer than a call.
TARGET_S = 0.1
# The number of calls that are measured. Two calls before them trace the step and warm up.
TRIALS = 8
# A call takes at least this long. A clock outside the call cannot measure this part.
CALL_S = 0.0005
# The time of a step is taken as at least this long.
SHORTEST_STEP_S = 1e-6


class StepsPerExecution:
    """The number of steps of each execution, given or chosen by measurement.

    The number is 1 until `TRIALS` executions were measured. Then the chief chooses it, and all
    workers change to it by `agree` at the same execution.

    Args:
        steps: the number of steps; None lets it be chosen.
        maximum: the largest number that may be chosen; None sets no limit.

    Attributes:
        at_once: the number of steps of the next execution.
        wish: the number of steps that this worker wants for each execution; 0 wants no change.
    """

    def __init__(self, steps: int | None, *, maximum: int | None = None) -> None:
        self.at_once = steps or 1
        self._maximum = maximum
        self.wish = 0
        self._open = steps is None
        self._compiled_s = 0.0
        self._periods: list[float] = []
        self._outside: list[float] = []

    def add(self, period_s: float, inside_s: float, steps_left: int) -> None:
        """Adds the measurement of an execution of one step.

        Args:
            period_s: seconds from the end of the execution before to the end of this one.
            inside_s: the part of these seconds that the execution itself took.
            steps_left: the steps until the end of `fit`.
        """
        if not self._open:
            return
        self._compiled_s = max(self._compiled_s, inside_s)
        self._periods.append(period_s)
        self._outside.append(period_s - inside_s)
        if len(self._periods) == TRIALS + 2:
            self._open = False
            self.wish = self._best(steps_left)

    def _best(self, steps_left: int) -> int:
        """Returns the number of steps to take in each execution, or 0 for no change."""
        step_s = statistics.median(self._periods[2:])
        call_s = max(statistics.median(self._outside[2:]), 0.0) + CALL_S
        # The steps alone, without the cost of their calls, should take `TARGET_S`.
        steps = int(TARGET_S / max(step_s - call_s, SHORTEST_STEP_S))
        steps = min(steps, steps_left, self._maximum or steps)
        if steps < 2:
            return 0
        saved_s = call_s * (1 - 1 / steps) * steps_left
        return steps if saved_s > self._compiled_s else 0

    def agree(self, steps: int) -> None:
        """Takes the number of steps on which all workers have agreed; 0 changes nothing."""
        if steps:
            self.at_once, self.wish = steps, 0

"""How many steps one call into TensorFlow takes, chosen from what steps and calls cost."""

from __future__ import annotations

import statistics

TARGET_S = 0.1  # of a call: progress moves ten times a second, and a stop takes no longer
TRIALS = 8  # calls that are measured, after the two that are traced and warm up
CALL_S = (
    0.0005  # of a call of the smallest network, that no clock outside of it tells from its steps
)


class StepsPerExecution:
    """How many steps the next execution takes.

    `steps` is a number given, or None: then each is one step, until `TRIALS` were measured. More
    are taken when what the calls of the rest cost is more than compiling an execution of several
    steps does. The chief decides, and `agree` tells all workers at the same execution.
    """

    def __init__(self, steps: int | None, *, most: int | None = None) -> None:
        self.at_once = steps or 1
        self._most = most
        self._wish = 0
        self._open = steps is None
        self._compiled_s = 0.0
        self._periods: list[float] = []
        self._outside: list[float] = []

    @property
    def wish(self) -> int:
        """The steps that this worker wants for each execution from now on; 0: as it is."""
        return self._wish

    def add(self, period_s: float, inside_s: float, steps_left: int) -> None:
        """Counts an execution of one step.

        Args:
            period_s: since the execution before had ended.
            inside_s: those of them that the execution itself took.
            steps_left: until the end of `fit`.
        """
        if not self._open:
            return
        self._compiled_s = max(self._compiled_s, inside_s)
        self._periods.append(period_s)
        self._outside.append(period_s - inside_s)
        if len(self._periods) == TRIALS + 2:
            self._open = False
            self._wish = self._best(steps_left)

    def _best(self, steps_left: int) -> int:
        step_s = statistics.median(self._periods[2:])
        call_s = max(statistics.median(self._outside[2:]), 0.0) + CALL_S
        # A step without its call: several of them last as long as one execution shall.
        steps = int(TARGET_S / max(step_s - call_s, 1e-6))
        steps = min(steps, steps_left, self._most or steps)
        if steps < 2:
            return 0
        saved_s = call_s * (1 - 1 / steps) * steps_left
        return steps if saved_s > self._compiled_s else 0

    def agree(self, steps: int) -> None:
        """Takes what the chief wanted; 0: nothing new."""
        if steps:
            self.at_once, self._wish = steps, 0

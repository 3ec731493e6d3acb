"""Divides the time of a step into four parts that add up to the measured time.

With the sums over all measured steps, and `alone` for the same process without peers:

    host          = (seconds - executing_s) / steps
    input         = input_s / steps
    working       = (executing_s - input_s) / steps
    compute       = min(working, working of `alone`)
    communication = working - compute

Host is the time that Python takes between two calls of the compiled step. Input is the time inside
the calls in which the step waited for data. Communication is what a step with its data takes longer
with peers than without. It holds sums of gradients and metrics, as far as computing does not hide
them, and waiting for the slowest replica.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

PARTS = ("compute", "communication", "input", "host")


@dataclass(frozen=True)
class Phase:
    """The measured steps of a process, without the first execution.

    Attributes:
        steps: the number of steps.
        examples: the number of examples.
        seconds: the time from the end of the execution before the first one to the end of the last.
        executing_s: the part of `seconds` that the calls of the compiled step took.
        waited_s: the part of `executing_s` in which the steps waited for data.
    """

    steps: int
    examples: int
    seconds: float
    executing_s: float
    waited_s: float

    def __add__(self, other: Phase) -> Phase:
        """Returns both phases as one."""
        ours, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Phase(*(a + b for a, b in zip(ours, theirs, strict=True)))

    @property
    def working_ms(self) -> float:
        """The milliseconds of a step inside the call, without waiting for data."""
        return 1000 * (self.executing_s - self.input_s) / self.steps

    @property
    def input_s(self) -> float:
        """The seconds of waiting for data, limited to those of the calls."""
        return min(max(self.waited_s, 0.0), self.executing_s)


@dataclass(frozen=True)
class TimeParts:
    """The milliseconds of the parts of a step, as the module defines them.

    Attributes:
        compute: computing.
        communication: summing over replicas, and waiting for the slowest one.
        input: waiting for data inside the call (`StepResult.waits_s`).
        host: the time between two calls of the compiled step.
    """

    compute: float
    communication: float
    input: float
    host: float

    @property
    def step_ms(self) -> float:
        """The milliseconds of a step."""
        return self.compute + self.communication + self.input + self.host

    @classmethod
    def of(cls, phase: Phase, alone: Phase | None) -> TimeParts:
        """Returns the parts of the steps of one process.

        Args:
            phase: the steps with peers.
            alone: the steps of the same process on one device without peers. They have the rows of
                one replica, or the rows of the global batch if the replicas share cores. None:
                there are no peers.
        """
        working = phase.working_ms
        compute = working if alone is None else min(working, alone.working_ms)
        host = 1000 * (phase.seconds - phase.executing_s) / phase.steps
        waiting = 1000 * phase.input_s / phase.steps
        return cls(compute, working - compute, waiting, host)

    @classmethod
    def mean(cls, parts: Sequence[TimeParts]) -> TimeParts:
        """Returns the mean parts of several processes; they add up to the mean of their steps."""
        count = len(parts)
        return cls(*(sum(getattr(part, name) for part in parts) / count for name in PARTS))

    def as_dict(self) -> dict[str, float]:
        """Returns the parts by their names."""
        return dataclasses.asdict(self)

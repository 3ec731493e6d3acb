"""Where a step's time goes: four parts that add up to the measured time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

PARTS = ("compute", "communication", "input", "host")


@dataclass(frozen=True)
class Phase:
    """What a process measured of its steps, the first execution left out.

    `seconds` are from the end of the execution before the first one to the end of the last one;
    of these the calls of the compiled step took `executing_s`, and `waited_s` of those went by
    without data.
    """

    steps: int
    examples: int
    seconds: float
    executing_s: float
    waited_s: float

    def __add__(self, other: Phase) -> Phase:
        """Returns what both measured."""
        ours, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Phase(*(a + b for a, b in zip(ours, theirs, strict=True)))

    @property
    def working_ms(self) -> float:
        """Milliseconds of a step with its data there."""
        return 1000 * (self.executing_s - self.input_s) / self.steps

    @property
    def input_s(self) -> float:
        return min(max(self.waited_s, 0.0), self.executing_s)


@dataclass(frozen=True)
class TimeParts:
    """Milliseconds of a step; the four parts add up to `step_ms`.

    - `host`: between two calls of the compiled step, Python's part.
    - `input`: inside of it, without data (`outcomes.Outcome.waited_s`).
    - `compute`: the rest, or what the rest is without peers, if that is less: see `of`.
    - `communication`: what is left. With peers a step takes that much longer: summing gradients
      and metrics as far as computing does not hide it, and waiting for the slowest replica.
    """

    compute: float
    communication: float
    input: float
    host: float

    @property
    def step_ms(self) -> float:
        return self.compute + self.communication + self.input + self.host

    @classmethod
    def of(cls, phase: Phase, alone: Phase | None) -> TimeParts:
        """Returns the parts of one process' steps.

        Args:
            alone: the same process' steps of one device with the same local batch, or the global
                one where the replicas share cores; None: it has no peers.
        """
        working = phase.working_ms
        compute = working if alone is None else min(working, alone.working_ms)
        host = 1000 * (phase.seconds - phase.executing_s) / phase.steps
        waiting = 1000 * phase.input_s / phase.steps
        return cls(compute, working - compute, waiting, host)

    @classmethod
    def mean(cls, parts: Sequence[TimeParts]) -> TimeParts:
        """Returns the mean of several processes' parts: they add up to that of their steps."""
        count = len(parts)
        return cls(*(sum(getattr(part, name) for part in parts) / count for name in PARTS))

    def as_dict(self) -> dict[str, float]:
        return dataclasses.asdict(self)

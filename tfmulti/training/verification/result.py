"""The result of `verify` as a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of a comparison of the first steps on replicas and on one device.

    A quantity is a weight, a slot of an optimizer, a state of a metric or a layer, a log, or the
    state of a random generator.

    Attributes:
        verdict: `same` or `skipped`.
        reason: why the comparison was skipped.
        steps: the number of steps that were compared.
        replicas: the number of replicas.
        quantities: the number of quantities that were compared.
        undecided: the number of further quantities that tell nothing. They change by more than a
            tenth of themselves when the weights change in their last digits.
        closest: the name of the quantity that was nearest to its limit.
        difference: how far that quantity is from its value on one device.
        limit: the largest difference of that quantity that rounding explains.
        seconds: the seconds that the comparison took.
        seconds_apart: the part of `seconds` that the training does not need itself.
    """

    verdict: str
    reason: str = ""
    steps: int = 0
    replicas: int = 1
    quantities: int = 0
    undecided: int = 0
    closest: str = ""
    difference: float = 0.0
    limit: float = 0.0
    seconds: float = 0.0
    seconds_apart: float = 0.0

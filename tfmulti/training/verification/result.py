"""What `verify` found, as a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What the comparison of the first steps on replicas and on one device found.

    `verdict` is `same`, or `skipped` for a `reason`. Of `quantities` (weights, slots of
    optimizers, states of metrics and layers, logs, states of random generators) `closest` was the
    one nearest to its limit: `difference` is how far it is from one device's, and `limit` what
    rounding explains. `undecided` quantities change by more than a tenth of themselves when the
    weights change in their last digit, so they say nothing. `seconds` is what the comparison
    took, of which `seconds_apart` is the part that training does not need itself.
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

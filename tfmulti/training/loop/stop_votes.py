"""Lets all workers stop, make checkpoints, and compare their times after the same step.

Each worker votes with every execution. The votes travel with the metrics, in the same collective.
All workers follow the sum of the votes, so none of them is left waiting for another.
"""

from __future__ import annotations

from collections.abc import Sequence

# The reasons to stop. A later one outweighs an earlier one.
REASONS = ("requested", "SIGINT", "SIGTERM")
# The votes that travel with each execution.
VOTES = (*REASONS, "checkpoint", "pace", "comparison")


def votes(
    wants_stop: bool,
    interrupted: str | None,
    *,
    wants_checkpoint: bool = False,
    pace: int = 0,
    wants_comparison: bool = False,
) -> list[float]:
    """Returns this worker's votes, one number for each of `VOTES`.

    Args:
        wants_stop: whether this worker wants to stop.
        interrupted: the signal that asks this worker to stop, or None.
        wants_checkpoint: whether this worker wants a checkpoint after this execution.
        pace: the steps that this worker wants for each execution; 0 wants no change.
        wants_comparison: whether this worker wants to compare the times of the workers.
    """
    asked = {"requested": wants_stop, "checkpoint": wants_checkpoint, "pace": pace}
    asked["comparison"] = wants_comparison
    return [float(asked.get(vote, False) or vote == interrupted) for vote in VOTES]


def verdict(counted: Sequence[float]) -> str | None:
    """Returns the weightiest reason to stop that has a vote, or None to go on.

    >>> verdict([1, 0, 2, 0])
    'SIGTERM'
    """
    given = [reason for reason, count in zip(REASONS, counted, strict=False) if count > 0]
    return given[-1] if given else None


def wants_checkpoint(counted: Sequence[float]) -> bool:
    """Returns whether the workers make a checkpoint after this execution.

    >>> wants_checkpoint([0, 0, 0, 1, 0])
    True
    """
    return counted[VOTES.index("checkpoint")] > 0


def compares(counted: Sequence[float]) -> bool:
    """Returns whether the workers compare their times after this execution.

    >>> compares([0, 0, 0, 0, 0, 1])
    True
    """
    return counted[VOTES.index("comparison")] > 0


def agreed_pace(counted: Sequence[float], local_replicas: int) -> int:
    """Returns the steps that the chief wants for each execution; 0 wants no change.

    The sum counts the chief's vote once for each of its replicas.

    >>> agreed_pace([0, 0, 0, 0, 40], 2)
    20
    """
    return round(counted[VOTES.index("pace")] / local_replicas)

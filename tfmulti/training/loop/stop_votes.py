"""Lets all workers stop, make checkpoints, and compare their times after the same step.

Each worker votes with every execution. The votes travel with the metrics, in the same collective.
All workers follow the sum of the votes, so none of them is left waiting for another.
"""

from __future__ import annotations

from typing import NamedTuple


class Votes(NamedTuple):
    """The votes of one worker, or their sums over all replicas.

    Each replica adds the votes of its worker.

    Attributes:
        requested: whether to stop, because a callback has asked for it.
        sigint: whether to stop, because SIGINT has come.
        sigterm: whether to stop, because SIGTERM has come.
        checkpoint: whether to make a checkpoint after this execution.
        steps: the number of steps that the chief wants for each execution; 0 wants no change.
        comparison: whether to compare the times of the workers after this execution.
    """

    requested: int = 0
    sigint: int = 0
    sigterm: int = 0
    checkpoint: int = 0
    steps: int = 0
    comparison: int = 0

    def reason_to_stop(self) -> str | None:
        """Returns the strongest reason to stop that a worker voted for, or None to go on.

        >>> Votes(requested=1, sigterm=2).reason_to_stop()
        'SIGTERM'
        """
        if self.sigterm:
            return "SIGTERM"
        if self.sigint:
            return "SIGINT"
        return "requested" if self.requested else None

    def agreed_steps(self, local_replicas: int) -> int:
        """Returns the steps that the chief wants for each execution; 0 wants no change.

        The sum counts the chief's vote once for each of its replicas.

        >>> Votes(steps=40).agreed_steps(2)
        20
        """
        return self.steps // local_replicas

"""`Straggler`: the worker for which the others wait in every step, as the report has it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# A worker is a straggler if its own part of the steps takes so many times as long as the median
# worker's.
SLOWDOWN = 1.5
# All workers wait for the network if each of them waits for such a share of the steps.
_NETWORK_SHARE = 0.5
COMPUTING, DATA, NETWORK = "computing", "data", "network"


@dataclass(frozen=True)
class Straggler:
    """What the steps of an epoch have waited for.

    Attributes:
        cause: `computing`, `data` or `network`.
        worker: the rank of the slow worker. None: the network, for which all wait alike.
        address: the worker's `host:port`, or an empty text.
        slowdown: how many times as long as the median worker it takes; 1.0 for the network.
        share: the share of the steps that is lost by it.

    Raises:
        ValueError: the cause is another one.
    """

    cause: str
    worker: int | None
    address: str
    slowdown: float
    share: float

    def __post_init__(self) -> None:
        if self.cause not in (COMPUTING, DATA, NETWORK):
            raise ValueError(f"cause is {self.cause[:80]!r}")

    def words(self) -> str:
        """Returns what is slow, and what to do, in a line."""
        percent = f"{100 * self.share:.0f} % of the step"
        if self.worker is None:
            return (
                f"all workers wait for messages for {percent}: the network is slow, or the workers "
                "are slow in turns; try a larger batch or --gradient_compression bfloat16, and "
                "test the links: tfmulti doctor"
            )
        advice = (
            "look at its disk, or try more --reader_threads or --cache memory"
            if self.cause == DATA
            else "look for other programs, heat or fewer cores there: tfmulti doctor"
        )
        return (
            f"worker {self.worker} ({self.address}) takes {self.slowdown:.1f} × as long as the "
            f"median worker, by {self.cause}; the others wait for it for {percent}; {advice}"
        )


def straggler_of(
    seconds: Sequence[float],
    for_data: Sequence[float],
    for_others: Sequence[float],
    addresses: Sequence[str],
) -> Straggler | None:
    """Returns what the steps of an epoch have waited for, or None if nothing stands out.

    Args:
        seconds: how long the steps took on each worker.
        for_data: the part of it in which the steps waited for data.
        for_others: the part of it in which they waited for messages of other workers.
        addresses: the `host:port` of each worker.

    >>> straggler_of([10.0] * 3, [0.0] * 3, [6.0, 1.0, 5.0], ["a:1", "b:1", "c:1"]).words()[:40]
    'worker 1 (b:1) takes 1.8 × as long as th'
    """
    own = [total - waited for total, waited in zip(seconds, for_others, strict=True)]
    # With two workers the median would be between them.
    usual, rank = statistics.median_low(own), max(range(len(own)), key=own.__getitem__)
    lost_s = own[rank] - usual
    if usual > 0 and own[rank] >= SLOWDOWN * usual:
        by_data = for_data[rank] - statistics.median_low(for_data) >= lost_s / 2
        cause = DATA if by_data else COMPUTING
        slowdown = own[rank] / usual
        return Straggler(cause, rank, addresses[rank], slowdown, lost_s / seconds[rank])
    share = min(part / total for part, total in zip(for_others, seconds, strict=True))
    return Straggler(NETWORK, None, "", 1.0, share) if share >= _NETWORK_SHARE else None

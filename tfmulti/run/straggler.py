"""Finds the worker for which the others wait in every step: the straggler.

The time that a worker works is the time of its steps without waiting for others. The worker that
works longest is the straggler if it takes 1.5 times as long as the median worker. If no worker does
and all of them wait for half of the time, the network is slow. It is the link of one worker if the
others wait for the messages to and from that worker alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# A worker is a straggler if its steps, without waiting for others, take at least this many times as
# long as those of the median worker.
SLOWDOWN = 1.5
# All workers wait for the network if each of them waits for at least this share of the steps.
_NETWORK_SHARE = 0.5
# The link of a worker is slow if the others wait for its messages for this share of their waits.
_LINK_SHARE = 0.75
COMPUTING, DATA, NETWORK = "computing", "data", "network"


@dataclass(frozen=True)
class Straggler:
    """What the steps of an epoch have waited for.

    Attributes:
        cause: `computing`, `data` or `network`.
        worker: the rank of the slow worker, or of the worker with the slow link. None: the network,
            for which all wait alike.
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
        if self.cause == NETWORK and self.worker is not None:
            return (
                f"all workers wait for messages for {percent}, most of it for those to and from "
                f"worker {self.worker} ({self.address}): its link is slow; test it: tfmulti doctor"
            )
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
    by_worker: Sequence[Sequence[float]] = (),
) -> Straggler | None:
    """Returns what the steps of an epoch have waited for, or None if nothing stands out.

    Args:
        seconds: how long the steps took on each worker.
        for_data: the part of it in which the steps waited for data.
        for_others: the part of it in which they waited for messages of other workers.
        addresses: the `host:port` of each worker.
        by_worker: for each worker, the parts of `for_others` by the rank of the worker whose
            message was the last one. Empty if they are not known.

    >>> straggler_of([10.0] * 3, [0.0] * 3, [6.0, 1.0, 5.0], ["a:1", "b:1", "c:1"]).words()[:40]
    'worker 1 (b:1) takes 1.8 × as long as th'
    """
    working_s = [total - waited for total, waited in zip(seconds, for_others, strict=True)]
    # With two workers the median would be between them.
    median_s = statistics.median_low(working_s)
    slowest_s = max(working_s)
    rank, lost_s = working_s.index(slowest_s), slowest_s - median_s
    if median_s > 0 and slowest_s >= SLOWDOWN * median_s:
        by_data = for_data[rank] - statistics.median_low(for_data) >= lost_s / 2
        cause = DATA if by_data else COMPUTING
        slowdown = slowest_s / median_s
        return Straggler(cause, rank, addresses[rank], slowdown, lost_s / seconds[rank])
    share = min(part / total for part, total in zip(for_others, seconds, strict=True))
    if share < _NETWORK_SHARE:
        return None
    worker = _slow_link(by_worker)
    return Straggler(NETWORK, worker, "" if worker is None else addresses[worker], 1.0, share)


def _slow_link(by_worker: Sequence[Sequence[float]]) -> int | None:
    """Returns the rank of the worker for whose messages all others wait, or None.

    Each of two workers waits for the other one, so their link belongs to both.
    """
    if len(by_worker) < 3:
        return None
    waited_for = [
        rank
        for rank in range(len(by_worker))
        if all(
            waits[rank] >= _LINK_SHARE * sum(waits)
            for other, waits in enumerate(by_worker)
            if other != rank
        )
    ]
    return waited_for[0] if len(waited_for) == 1 else None

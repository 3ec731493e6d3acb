"""Decides which machines take part in the next attempt, and with how many workers each.

All functions are pure: the hosts, the history and the time are arguments. A host is left out in
two cases:

- One of its workers got a notice (SIGTERM to it alone): the machine is about to be taken away.
- Its workers fail twice in a row without progress of the job.

Each case leaves out one worker more of the host, for 60 seconds after a notice and for a time that
doubles after failures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tfmulti.launch.policy import Attempt

# How long a worker of a host is left out after a notice.
NOTICE_S = 60.0

# How long a worker of a host is left out after its failures. The time doubles with each absence.
GIVEN_UP_S = 60.0

# The failures in a row, without progress, after which a worker of a host is left out.
STRIKES = 2

# Pairs of a host and its number of workers, in the order of ranks.
Placement = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Limits:
    """How many machines and workers a job may have.

    Attributes:
        min_nodes: the least number of machines.
        max_nodes: the greatest number of machines.
        min_workers: the least number of workers on all machines together.
    """

    min_nodes: int
    max_nodes: int
    min_workers: int


@dataclass(frozen=True)
class Absence:
    """How many workers of a host are left out, and for how long.

    Attributes:
        workers: the number of workers that are left out.
        until_s: when the absence ends, in seconds of the launcher's clock.
        times: how many absences the host has had, with this one.
    """

    workers: int
    until_s: float
    times: int = 1


@dataclass(frozen=True)
class Standing:
    """What the launcher remembers of the hosts from one attempt to the next.

    Attributes:
        strikes: for each host, the failures in a row without progress of the job.
        absent: for each host, its last absence, which may have ended.
    """

    strikes: Mapping[str, int] = field(default_factory=dict)
    absent: Mapping[str, Absence] = field(default_factory=dict)


def choose(
    answering: Sequence[tuple[str, int]], standing: Standing, limits: Limits, now_s: float
) -> Placement | None:
    """Returns which hosts take part with how many workers, or None if there are too few.

    Absent workers take part nevertheless if the job could not go on without them.

    Args:
        answering: the hosts that can be used and the workers that each can run, in order.
        standing: the absences of the hosts.
        limits: how many machines and workers the job may have.
        now_s: the time, in seconds of the launcher's clock.

    >>> limits = Limits(min_nodes=1, max_nodes=2, min_workers=2)
    >>> away = Standing(absent={"a": Absence(workers=1, until_s=9.0)})
    >>> choose([("a", 2), ("b", 2)], away, limits, now_s=5.0)
    (('a', 1), ('b', 2))
    >>> choose([("a", 2)], away, limits, now_s=5.0)
    (('a', 2),)
    """
    left_out = {
        host: absence.workers
        for host, absence in standing.absent.items()
        if absence.until_s > now_s
    }
    for without in (left_out, {}):
        rest = [(host, slots - without.get(host, 0)) for host, slots in answering]
        placement = tuple(pair for pair in rest if pair[1] > 0)[: limits.max_nodes]
        workers = sum(count for _, count in placement)
        if len(placement) >= limits.min_nodes and workers >= limits.min_workers:
            return placement
    return None


def after(
    standing: Standing,
    attempt: Attempt,
    hosts: Mapping[int, str],
    *,
    progressed: bool,
    now_s: float,
) -> Standing:
    """Returns what the launcher remembers after an attempt.

    A worker that got a notice (SIGTERM to it alone, as clouds send it) is left out for a while.
    So is a worker of a host whose workers fail twice without progress of the job in between.

    Args:
        standing: what the launcher remembered before.
        attempt: the failures of the attempt.
        hosts: the host of each rank. Ranks on hosts that do not answer are missing.
        progressed: whether the job has reached a later step than ever before.
        now_s: the time, in seconds of the launcher's clock.
    """
    if attempt.cause.had_notice:
        for failure in attempt.failures:
            if failure.had_notice and failure.rank in hosts:
                left_out = _left_out(standing, hosts[failure.rank], now_s, NOTICE_S)
                standing = replace(standing, absent=left_out)
        return standing
    if attempt.cause.rank not in hosts:
        return standing
    host = hosts[attempt.cause.rank]
    strikes = {} if progressed else dict(standing.strikes)
    strikes[host] = strikes.get(host, 0) + 1
    if strikes[host] < STRIKES:
        return replace(standing, strikes=strikes)
    del strikes[host]
    times = standing.absent[host].times if host in standing.absent else 0
    return Standing(strikes, _left_out(standing, host, now_s, GIVEN_UP_S * 2**times))


def _left_out(standing: Standing, host: str, now_s: float, wait_s: float) -> dict[str, Absence]:
    """Returns all absences after one worker more of a host is left out for `wait_s`."""
    before = standing.absent.get(host, Absence(0, 0.0, 0))
    already = before.workers if before.until_s > now_s else 0
    return {**standing.absent, host: Absence(already + 1, now_s + wait_s, before.times + 1)}


def describe_placement(placement: Placement) -> str:
    """Returns a placement in words.

    >>> describe_placement((("a", 1), ("b", 2)))
    '3 workers: 1 on a, 2 on b'
    """
    workers = sum(count for _, count in placement)
    counts = ", ".join(f"{count} on {host}" for host, count in placement)
    return f"{workers} worker{'s' if workers > 1 else ''}: {counts}"


def ranks_of(placement: Placement) -> dict[int, tuple[str, int, int]]:
    """Returns for each rank its host, its local rank, and the number of workers on that host.

    >>> ranks_of((("a", 1), ("b", 2)))
    {0: ('a', 0, 1), 1: ('b', 0, 2), 2: ('b', 1, 2)}
    """
    locations = [(host, local, count) for host, count in placement for local in range(count)]
    return dict(enumerate(locations))

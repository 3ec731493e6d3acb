"""Which machines take part in the next attempt, and with how many workers: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tfmulti.launch.policy import Attempt

NOTICE_S = 60.0  # a machine that is about to be taken away is not asked again before
GIVEN_UP_S = 60.0  # nor one whose worker fails again and again; doubled each time
STRIKES = 2  # failures in a row, without progress, after which a worker is given up

Placement = tuple[tuple[str, int], ...]  # (host, workers on it) in the order of ranks


@dataclass(frozen=True)
class Limits:
    """How many machines and workers a job may have. It is elastic where that leaves a choice."""

    min_nodes: int
    max_nodes: int
    min_workers: int


@dataclass(frozen=True)
class Absence:
    """So many workers of a host are left out until then, for the `times`th time."""

    workers: int
    until_s: float
    times: int = 1


@dataclass(frozen=True)
class Standing:
    """What is remembered of the hosts: failures in a row of each, and who is left out."""

    strikes: Mapping[str, int] = field(default_factory=dict)
    absent: Mapping[str, Absence] = field(default_factory=dict)


def choose(
    answering: Sequence[tuple[str, int]], standing: Standing, limits: Limits, now_s: float
) -> Placement | None:
    """Returns who takes part, or None where there are too few.

    Args:
        answering: the hosts that can be used and the workers that each takes, in order.

    Who should be left out takes part nevertheless where the job could not go on without.

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
    found: Attempt,
    hosts: Mapping[int, str],
    *,
    progressed: bool,
    now_s: float,
) -> Standing:
    """Returns what is remembered after an attempt, `hosts` being those of the ranks.

    A worker that was told to go (SIGTERM to it alone, a cloud's notice) is left out for a
    while; so is one of a host whose workers fail twice without progress in between.
    """
    if found.cause.notice:
        for failure in found.failures:
            if failure.notice and failure.rank in hosts:
                left_out = _left_out(standing, hosts[failure.rank], now_s, NOTICE_S)
                standing = replace(standing, absent=left_out)
        return standing
    if found.cause.rank not in hosts:
        return standing
    host = hosts[found.cause.rank]
    strikes = {} if progressed else dict(standing.strikes)
    strikes[host] = strikes.get(host, 0) + 1
    if strikes[host] < STRIKES:
        return replace(standing, strikes=strikes)
    del strikes[host]
    times = standing.absent[host].times if host in standing.absent else 0
    return Standing(strikes, _left_out(standing, host, now_s, GIVEN_UP_S * 2**times))


def _left_out(standing: Standing, host: str, now_s: float, wait_s: float) -> dict[str, Absence]:
    before = standing.absent.get(host, Absence(0, 0.0, 0))
    already = before.workers if before.until_s > now_s else 0
    return {**standing.absent, host: Absence(already + 1, now_s + wait_s, before.times + 1)}


def words_of(placement: Placement) -> str:
    """Returns who takes part, for people.

    >>> words_of((("a", 1), ("b", 2)))
    '3 workers: 1 on a, 2 on b'
    """
    workers = sum(count for _, count in placement)
    words = ", ".join(f"{count} on {host}" for host, count in placement)
    return f"{workers} worker{'s' if workers > 1 else ''}: {words}"


def ranks_of(placement: Placement) -> dict[int, tuple[str, int, int]]:
    """Returns, for each rank, its host, its place there, and how many are there.

    >>> ranks_of((("a", 1), ("b", 2)))
    {0: ('a', 0, 1), 1: ('b', 0, 2), 2: ('b', 1, 2)}
    """
    places = [(host, local, count) for host, count in placement for local in range(count)]
    return dict(enumerate(places))

"""Compares the workers of a job on the chief, by what each of them has found."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from tfmulti.cluster.cluster import Cluster
from tfmulti.doctor.finding import FAILED, OK, WARNING, Finding, findings_of
from tfmulti.doctor.result import Result
from tfmulti.launch.addresses import NO_NAME, NO_ROUTE, REFUSED, TIMED_OUT

_CLOCK_S = 1.0
# A link this slow takes eight seconds for the gradients of a ResNet-50, 100 MB.
_SLOW_MB_S = 12.5
# A link is slow if the median of all links is this many times as fast.
_SLOWER = 4.0
_MEANING = {
    TIMED_OUT: (
        "nothing answers: a firewall drops the packets, or the machine is off",
        "Open the port {port} on {host} for the machines of the job, and start all workers.",
    ),
    REFUSED: (
        "nobody listens there",
        "Look whether this worker has started, and whether {address} is its own address.",
    ),
    NO_ROUTE: (
        "no route leads there, or a firewall refuses the packets",
        "Look at the routes and the firewalls between the machines.",
    ),
    NO_NAME: (
        "the name {host} does not resolve",
        "Add {host} to DNS or /etc/hosts on that machine, or use the number of the address.",
    ),
}


def compare(
    cluster: Cluster, results: Mapping[int, Result], duplicate_ranks: Iterable[int] = ()
) -> list[Finding]:
    """Returns the findings about the job, from the results of its workers by rank.

    Args:
        cluster: the cluster.
        results: the results that have arrived, by rank, with that of the chief.
        duplicate_ranks: the ranks for which several processes have sent results.
    """
    findings = [
        Finding(
            "rank",
            FAILED,
            "several processes have this rank",
            "each worker has its own index in TF_CONFIG's task",
            "Correct TF_CONFIG's task.index on one of the machines.",
            rank,
        )
        for rank in sorted(duplicate_ranks)
    ]
    for rank, result in sorted(results.items()):
        try:
            findings += findings_of(result.findings, rank)
        except ValueError as error:
            findings.append(Finding("result", FAILED, f"it cannot be read: {error}", worker=rank))
    return [
        *findings,
        *_missing(cluster, results),
        *_unreachable(cluster, results),
        *_equal(results, "versions", "the same versions on all workers", "Install the same ones."),
        *_equal(
            results,
            "GPUs",
            "as many on each worker",
            "Start as many workers on each machine, or set CUDA_VISIBLE_DEVICES.",
        ),
        *_clocks(results),
        *_run_folder(results),
        *_links(results),
    ]


def links_of(results: Mapping[int, Result]) -> list[dict[str, float]]:
    """Returns the measured links, each with its two ranks, ordered by these."""
    return [
        {
            "from": rank,
            "to": int(other),
            "rtt_ms": round(result.rtt_ms[other], 3),
            "mb_s": round(speed, 1),
        }
        for rank, result in sorted(results.items())
        for other, speed in sorted(result.mb_s.items(), key=lambda item: int(item[0]))
        if other in result.rtt_ms
    ]


def _missing(cluster: Cluster, results: Mapping[int, Result]) -> list[Finding]:
    """Returns the workers whose results have not arrived."""
    return [
        Finding(
            "worker",
            FAILED,
            f"it has sent nothing ({cluster.addresses[rank]})",
            "every worker runs the doctor at the same time",
            "Start it, and read what it prints.",
            rank,
        )
        for rank in range(cluster.size)
        if rank not in results
    ]


def _unreachable(cluster: Cluster, results: Mapping[int, Result]) -> list[Finding]:
    """Returns which workers cannot reach which others, with the reason."""
    findings = []
    for rank, address in enumerate(cluster.addresses):
        host, port = cluster.hosts[rank], address.rpartition(":")[2]
        reasons: dict[str, list[int]] = {}
        for other, result in sorted(results.items()):
            if str(rank) in result.errors:
                reasons.setdefault(result.errors[str(rank)], []).append(other)
        for reason, others in reasons.items():
            values = {"host": host, "port": port, "address": address}
            # Only the texts of `_MEANING` are formats. Another machine may send any other reason.
            words, advice = reason, "Look at the network between them."
            if reason in _MEANING:
                words, advice = (text.format(**values) for text in _MEANING[reason])
            callers = f"worker{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
            findings.append(
                Finding(
                    "connection",
                    FAILED,
                    f"{callers} cannot reach it at {address}: {words}",
                    "every worker reaches every other one",
                    advice,
                    rank,
                )
            )
    if not findings and cluster.size > 1 and len(results) == cluster.size:
        return [Finding("connections", OK, "every worker reaches every other one")]
    return findings


def _equal(results: Mapping[int, Result], name: str, rule: str, advice: str) -> list[Finding]:
    """Returns the workers in which a fact differs from the chief's."""
    expected, findings = results[0].facts.get(name), []
    for rank, result in sorted(results.items()):
        fact = result.facts.get(name)
        if fact != expected:
            findings.append(Finding(name, FAILED, _difference(expected, fact), rule, advice, rank))
    return findings or [Finding(name, OK, "equal on all workers")]


def _difference(expected: Any, fact: Any) -> str:
    """Returns in words how the fact of a worker differs from the chief's."""
    if not isinstance(expected, dict) or not isinstance(fact, dict):
        return f"{fact!r}, but worker 0 has {expected!r}"
    return "; ".join(
        f"{key} {fact.get(key, 'is missing')}, but worker 0 has {expected.get(key, 'none')}"
        for key in sorted({*expected, *fact})
        if fact.get(key) != expected.get(key)
    )[:500]


def _clocks(results: Mapping[int, Result]) -> list[Finding]:
    """Returns the workers whose clocks differ from the chief's, if the difference is known."""
    ahead = results[0].clock_s | {
        str(rank): -result.clock_s["0"]
        for rank, result in results.items()
        if "0" in result.clock_s and str(rank) not in results[0].clock_s
    }
    findings = [
        Finding(
            "clock",
            WARNING,
            f"it is {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} worker 0's",
            f"clocks within {_CLOCK_S:g} s, so that logs can be compared",
            "Start chrony or another NTP client there.",
            int(rank),
        )
        for rank, seconds in sorted(ahead.items())
        if abs(seconds) > _CLOCK_S
    ]
    if findings or not ahead:
        return findings
    most = max(map(abs, ahead.values()))
    return [Finding("clocks", OK, f"within {1000 * most:.0f} ms")]


def _run_folder(results: Mapping[int, Result]) -> list[Finding]:
    """Returns the workers that do not see the chief's run directory."""
    mark = results[0].facts.get("seen")
    if mark is None:
        return []
    findings = [
        Finding(
            "run folder",
            FAILED,
            "it does not see the run directory of worker 0",
            "all workers share the run directory",
            "Give --run_dir on a file system that all machines mount, or train with "
            "--shared_run_dir=false.",
            rank,
        )
        for rank, result in sorted(results.items())
        if result.facts.get("seen") != mark
    ]
    return findings or [Finding("run folder", OK, "all workers see the same one")]


def _links(results: Mapping[int, Result]) -> list[Finding]:
    """Returns the links that are slow by themselves, or compared to the others."""
    speeds = {
        (rank, int(other)): speed
        for rank, result in results.items()
        for other, speed in result.mb_s.items()
    }
    if not speeds:
        return []
    usual = statistics.median(speeds.values())
    limit = max(_SLOW_MB_S, usual / _SLOWER)
    slow = {pair: speed for pair, speed in speeds.items() if speed < limit}
    findings = []
    while slow:
        # A slow worker slows down all its links, so they are one finding.
        slowest_rank = max(sorted(results), key=lambda rank: _slowness(rank, slow))
        own_links = {pair: slow.pop(pair) for pair in sorted(slow) if slowest_rank in pair}
        words = ", ".join(
            f"to worker {b} {speed:.3g}" if a == slowest_rank else f"from worker {a} {speed:.3g}"
            for (a, b), speed in own_links.items()
        )
        findings.append(
            Finding(
                "link",
                WARNING,
                f"{words} MB/s; the median of all links is {usual:.3g}",
                f"at least {_SLOW_MB_S:g} MB/s, and a quarter of the median: each step sends the "
                "gradients over the slowest link",
                "Look at the cable, the switch and what else uses them, or leave the machine out. "
                "--gradient_compression bfloat16 halves the bytes.",
                slowest_rank,
            )
        )
    return findings or [Finding("links", OK, f"{min(speeds.values()):.0f} MB/s or more")]


def _slowness(rank: int, slow: Mapping[tuple[int, int], float]) -> tuple[int, float]:
    """Returns a key for `max`: a worker's number of slow links, then its slowness in sending."""
    sending = [speed for (sender, _), speed in slow.items() if sender == rank]
    return sum(rank in pair for pair in slow), -min(sending, default=float("inf"))

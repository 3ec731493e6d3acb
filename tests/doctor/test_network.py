"""Tests what the workers of the doctor send each other, and what the chief makes of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any, cast

import pytest

from tfmulti.cluster.cluster import Cluster, Task
from tfmulti.doctor import job
from tfmulti.doctor.finding import FAILED, OK, Finding, Report, findings_of
from tfmulti.doctor.network import Network, _Connection
from tfmulti.doctor.result import Result
from tfmulti.launch.addresses import reserved

WAIT_S = 5.0


def exchanged(addresses: list[str], secrets: tuple[str, str]) -> tuple[dict[int, Result], Any]:
    """Returns the results that the chief of two workers has, and the verdicts of both."""
    results: dict[int, Result] = {}
    verdicts: list[Any] = []

    def decide(received: Mapping[int, Result]) -> str:
        results.update(received)
        return "well"

    def worker(rank: int) -> None:
        cluster = Cluster(tuple(addresses), Task("worker", rank))
        env = {"TFMULTI_SECRET": secrets[rank]}
        with Network(cluster, env, WAIT_S if secrets[0] == secrets[1] else 0.5) as network:
            measured = network.measure()
            measured.facts["from"] = rank
            verdicts.append(network.exchange(measured, decide if rank == 0 else None))

    threads = [threading.Thread(target=worker, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results, verdicts


def test_the_chief_has_every_result_and_all_have_its_verdict() -> None:
    with reserved(2) as addresses:
        results, verdicts = exchanged(list(addresses), ("a" * 20, "a" * 20))
    assert {rank: result.facts for rank, result in results.items()} == {
        0: {"from": 0},
        1: {"from": 1},
    }
    assert verdicts == ["well", "well"]
    assert 0 < results[0].rtt_ms["1"] < 1000
    assert results[1].mb_s["0"] > 1
    assert abs(results[0].clock_s["1"]) < 1


def test_workers_of_another_job_are_not_heard() -> None:
    with reserved(2) as addresses:
        results, _ = exchanged(list(addresses), ("a" * 20, "b" * 20))
    assert set(results) == {0}
    assert results[0].errors == {"1": "another program or job answers there"}


@pytest.mark.parametrize(
    "values",
    [
        None,
        {},
        [1],
        [{"check": "x"}],
        [{"check": "x", "status": "great", "measured": ""}],
        [{"check": "x", "status": "ok", "measured": 3}],
        [{"check": "x", "status": "ok", "measured": "", "more": 1}],
    ],
)
def test_findings_of_another_form_are_refused(values: Any) -> None:
    with pytest.raises(ValueError):
        findings_of(values, 1)
    cluster = Cluster(("h:1", "i:1"), Task("worker", 0))
    found = job.compare(cluster, {0: Result(), 1: Result(findings=values)})
    assert [each.worker for each in found if each.check == "result"] == [1]


def test_a_worker_cannot_write_control_characters_to_the_terminal() -> None:
    values = [{"check": "x\x1b[2J", "status": "failed", "measured": "a\nb" + "c" * 9999}]
    (finding,) = findings_of(values, 3)
    assert (finding.check, finding.worker) == ("x[2J", 3)
    assert finding.measured.startswith("abc")
    assert len(finding.measured) == 2000


def test_a_report_shows_rules_and_advice_where_something_is_wrong() -> None:
    findings = [
        Finding("cores", OK, "2", "rule", "advice"),
        Finding("disk", FAILED, "none free", "1 GiB", "Make room.", 1),
        Finding("cores", OK, "4", worker=1),
    ]
    links = [{"from": 0, "to": 1, "rtt_ms": 0.5, "mb_s": 117.0}]
    report = Report(findings, 2, links, 3.0)
    lines = list(report.lines())
    assert lines[:5] == [
        "ok       cores         2",
        "FAILED   disk          worker 1: none free",
        "         rule          1 GiB",
        "         do            Make room.",
        "         docs          troubleshooting#doctor",
    ]
    assert lines[7].split() == ["0", "1"]
    assert lines[8].split() == ["0", "-", "0.50", "/", "117"]
    assert lines[9].split() == ["1", "none", "-"]
    assert lines[-1].endswith("2 checks are ok, 0 gave a warning, 1 failed (3 s).")
    assert json.loads(report.to_json())["status"] == "failed"


def test_the_clock_of_a_worker_is_compared_in_either_direction() -> None:
    cluster = Cluster(("h:1", "i:1", "j:1"), Task("worker", 0))
    results = {
        0: Result(clock_s={"1": 2.5}),
        1: Result(),
        # The chief does not reach worker 2, whose clock is behind.
        2: Result(clock_s={"0": 3.0}),
    }
    clocks = [each for each in job.compare(cluster, results) if each.check == "clock"]
    assert [(each.worker, each.measured) for each in clocks] == [
        (1, "it is 2.5 s ahead of worker 0's"),
        (2, "it is 3.0 s behind worker 0's"),
    ]


@pytest.mark.parametrize("many", [(0.05, 0.2, 0.05), (0.9, 0.3, 0.2, 0.06, 0.05)])
def test_a_delay_of_the_machine_is_not_a_slow_link(
    monkeypatch: pytest.MonkeyPatch, many: tuple[float, ...]
) -> None:
    took_s = iter((0.06, 0.002, 0.002, *many))
    monkeypatch.setattr(_Connection, "_load", lambda self, size: next(took_s))
    megabytes_of_the_second = 32 * 1024**2 / 1e6
    assert _Connection(cast(Any, None)).bandwidth() == megabytes_of_the_second / 0.05

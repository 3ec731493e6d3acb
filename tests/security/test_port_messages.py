"""Fuzz tests of the messages of the port agreement and the doctor.

Each message is accepted, or refused by the documented error. What is accepted can be shown on a
terminal.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

# The fixture `little_memory` limits the memory of each test here, too.
from tests.security.test_parsers import damaged, fuzzed, like, little_memory, only
from tfmulti.cluster.cluster import Cluster, Task
from tfmulti.cluster.environments import mpi
from tfmulti.cluster.layout import Layout
from tfmulti.cluster.port_agreement import ProcessInfo, _answer
from tfmulti.config import json_values
from tfmulti.doctor import job
from tfmulti.doctor.finding import FAILED, Report
from tfmulti.doctor.result import Result, result_of
from tfmulti.errors import ClusterError

__all__ = ["little_memory"]

LAYOUT = Layout("slurm", 1, 2, 0, 1, "h2", ("h1",), "slurm 1.0", ("h1", "h2"))
OWN = ProcessInfo("h2", 17003, 1)
TOLD = {"host": "h2", "port": 17003, "gpus": 1}
SIZE = 3
RESULT = {
    "facts": {"versions": {"Python": "3.11", "keras": "3.14"}, "GPUs": 1, "seen": None},
    "findings": [{"check": "cores", "status": "ok", "measured": "2", "worker": None}],
    "rtt_ms": {"0": 0.5, "2": 1.5},
    "mb_s": {"0": 117.0, "2": 2.5},
    "clock_s": {"0": -0.25, "2": 1e6},
    "errors": {"2": "timed out", "0": "another program or job answers there"},
}


@fuzzed
@given(like(TOLD))
def test_what_a_process_tells(values: Any) -> None:
    with only(ValueError, ClusterError):
        told = json_values.build(ProcessInfo, values)
        assert 0 < told.port < 65536
        assert told.address.isprintable()
        assert type(told.gpus) is int


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": True},
        {"port": 10**400},
        {"port": 0},
        {"port": "17003"},
        {"gpus": True},
        {"gpus": -1},
        {"gpus": 10**400},
        {"host": ""},
        {"host": "h\x1b7"},
        {"host": "h" * 300},
        {"host": "a b"},
        {"host": "[::1]"},
        {"host": None},
        {"more": 1},
    ],
)
def test_what_no_process_can_tell(wrong: dict[str, Any]) -> None:
    assert json_values.build(ProcessInfo, TOLD).address == OWN.address
    with pytest.raises((ValueError, ClusterError)):
        json_values.build(ProcessInfo, TOLD | wrong)


@fuzzed
@given(like({"addresses": ["h1:17001", "h2:17003"]}, {"error": "two processes"}))
def test_what_the_chief_answers(values: Any) -> None:
    if not isinstance(values, dict):
        return
    with only(ValueError):
        found = _answer(LAYOUT, OWN, values)
        assert isinstance(found, str) or (len(found), found[1]) == (2, OWN.address)
        assert "".join(found).isprintable()


@fuzzed
@given(damaged(b"h1".ljust(256, b"\0") + b"n-2.example".ljust(256, b"\0")))
def test_the_names_that_mpi_tells(data: bytes) -> None:
    with only(ClusterError):
        assert all(name.isprintable() and name for name in mpi.names_of([data[:256], data[256:]]))


def shown(result: Result) -> str:
    """Returns the report of a job whose worker 1 has this result."""
    cluster = Cluster(("h1:1", "h2:1", "h3:1"), Task("worker", 0))
    results = {0: Result(facts={"GPUs": 1, "seen": "x"}), 1: result}
    findings = job.compare(cluster, results)
    report = Report(findings, SIZE, job.links_of(results), 1.0)
    json.loads(report.to_json(), parse_constant=pytest.fail)
    return "\n".join(report.lines())


@fuzzed
@given(like(RESULT, RESULT | {"errors": {"0": "{0.__class__}\x1b[2J"}}))
def test_the_result_of_a_worker(values: Any) -> None:
    with only(ValueError):
        result = result_of(values, SIZE)
        text = shown(result)
        assert text.replace("\n", "").isprintable()
        assert len(text) < 100_000


@fuzzed
@given(st.text(max_size=300))
def test_the_error_of_a_worker_is_shown_as_it_is(reason: str) -> None:
    text = shown(result_of({**RESULT, "errors": {"0": reason}}, SIZE))
    assert text.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "wrong",
    [
        {"mb_s": {"0": "fast"}},
        {"mb_s": {"0": True}},
        {"mb_s": {"0": math.inf}},
        {"mb_s": {"0": math.nan}},
        {"mb_s": {"0": -1.0}},
        {"mb_s": {"9": 1.0}},
        {"mb_s": {"\u0661": 1.0}},
        {"mb_s": {"00": 1.0}},
        {"clock_s": {"0": 1e300}},
        {"clock_s": {"0": [1]}},
        {"rtt_ms": [1]},
        {"errors": {"0": 3}},
        {"errors": {"-1": "x"}},
        {"facts": {"GPUs": [[]]}},
        {"facts": {"GPUs": 10**400}},
        {"facts": {"versions": {"keras": {}}}},
        {"facts": {f"fact {number}": 1 for number in range(17)}},
        {"facts": {"versions": {f"part {number}": "1" for number in range(65)}}},
        {"findings": [{}] * 257},
        {"findings": {}},
        {"more": 1},
    ],
)
def test_a_result_of_another_form_is_refused(wrong: dict[str, Any]) -> None:
    assert result_of(RESULT, SIZE).mb_s["2"] == 2.5
    with pytest.raises(ValueError):
        result_of(RESULT | wrong, SIZE)


def test_texts_of_a_result_cannot_change_the_terminal() -> None:
    result = result_of(
        {
            **RESULT,
            "facts": {"versions": {"keras\x1b[2J": "\x1b]0;title\x07" + "3" * 999}, "seen": "\n"},
            "errors": {"0": "{address.__class__}\x1b[31m"},
        },
        SIZE,
    )
    text = shown(result)
    assert "\x1b" not in text
    assert "worker 0: worker 1 cannot reach it at h1:1: {address.__class__}[31m" in text
    finding = next(
        each
        for each in job.compare(
            Cluster(("h1:1", "h2:1"), Task("worker", 0)), {0: Result(), 1: result}
        )
        if each.check == "connection"
    )
    assert (finding.status, finding.advice) == (FAILED, "Look at the network between them.")

"""Tests that the docs show the figures of the result files."""

from __future__ import annotations

import pytest

from benchmarks import curves, table, training_table
from benchmarks.result_files import read
from benchmarks.workloads import Workload


def test_the_docs_show_what_was_measured() -> None:
    text = table.PAGE.read_text()
    shown = text.split(table.BEGIN)[1].split(table.END)[0].strip()
    assert shown == table.table(), "run python -m benchmarks.table"


def test_the_docs_show_the_ends_of_the_curves() -> None:
    text = curves.PAGE.read_text()
    shown = text.split(curves.BEGIN)[1].split(curves.END)[0].strip()
    assert shown == curves.table(read("curves")["sides"])


def test_what_workers_send() -> None:
    """Each of two workers sends the bytes of all gradients, in their type."""
    sent = {side: curves.sent_kb(side, 1_000_000) for side in curves.SIDES}
    assert list(sent.values()) == [4000, 2000, 2000]


def test_the_docs_show_how_long_steps_take() -> None:
    text = table.PAGE.read_text()
    shown = text.split(training_table.BEGIN)[1].split(training_table.END)[0].strip()
    expected = training_table.table(read("compare")["workloads"])
    assert shown == expected, "run python -m benchmarks.training_table"


def test_the_best_peer_is_not_tfmulti_itself() -> None:
    """The compared steps are exact, except in columns that say otherwise."""
    found = {
        "tfmulti": {"step_ms": 20.0},
        "tfmulti, float16 between workers": {"step_ms": 5.0},
        "slow": {"step_ms": 60.0},
        "fast": {"step_ms": 30.0},
    }
    assert training_table.gain(found) == 1.5
    assert training_table.gain({"tfmulti": {"step_ms": 20.0}}) is None
    assert training_table.gain(found, ours=training_table.IN_HALVES) == 6
    alone = {**found, "Keras 3": {"step_ms": 40.0}}
    assert training_table.gain(alone, "one") == 2


def test_time_beyond_start_and_steps_is_computed() -> None:
    work = Workload("mlp", 8, steps=90, warm_up=11)
    figures = {"step_ms": 10.0, "mean_ms": 10.0, "start_s": 3.0, "after_s": 0.0}
    assert training_table.beyond(figures, work) == 0
    # The steps take 90 ms longer and the end 910 ms: together 1 s of 5 s.
    slower = {**figures, "mean_ms": 11.0, "after_s": 0.91}
    assert training_table.beyond(slower, work) == pytest.approx(0.2)

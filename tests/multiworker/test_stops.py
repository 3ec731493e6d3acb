"""A fit that is stopped goes on as if nothing had happened, on every kind of data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Behaviours = Callable[..., list[dict[str, Any]]]

EVERYWHERE = ("arrays", "Dataset of unknown length")
PLACES = [("one_device",), ("mirrored", 2), ("multi_worker_mirrored", 2)]
STOPS = [
    "stopped: arrays",
    "stopped: Dataset",
    "stopped: Dataset of unknown length",
    "stopped: repeated Dataset",
    "stopped: PyDataset",
    "stopped: generator",
    "stopped_in_the_evaluation",
    "stopped_between_executions",
]


@pytest.mark.parametrize("name", STOPS)
def test_it_ends_as_the_run_that_was_not_stopped(behaviours: Behaviours, name: str) -> None:
    """To the bit: history, logs of every step, weights, slots, what callbacks know."""
    kind = name.removeprefix("stopped: ")
    for place in PLACES if kind in EVERYWHERE or kind == name else PLACES[:1]:
        for worker in behaviours(*place):
            assert worker[name] is True


def test_another_run_does_not_go_on(behaviours: Behaviours) -> None:
    for place in PLACES:
        for worker in behaviours(*place):
            model, seed, rows, never, must = worker["resumed_otherwise"]
            assert "ResumeError: the model has changed: its variable" in model
            assert "ResumeError: saved seed=4, this run seed=5" in seed
            assert "saved examples=61 of the training data, this run examples=60" in rows
            assert "holds backups of a run, and resume is 'never'" in never
            assert "there is no whole backup in" in must

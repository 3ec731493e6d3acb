"""Tests the lines that a run prints at its end."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tfmulti.run.report import FitReport
from tfmulti.run.summary import speed_words


def report(**values: Any) -> FitReport:
    """Returns a report with some values, and nothing in the others."""
    names = {field.name: None for field in dataclasses.fields(FitReport)}
    return FitReport(**{**names, "seconds": 2.0, "examples_per_second": 1234.0, **values})


@pytest.mark.parametrize(
    ("steps", "before", "words"),
    [
        (1407, 1406, "1 step after step 1,406, 64 examples in 2 s; "),
        (4293, 0, "4,293 steps, 64 examples in 2 s; "),
        (1406, 1406, "nothing was left to train after step 1,406"),
    ],
)
def test_the_speed_has_the_steps_of_this_process(steps: int, before: int, words: str) -> None:
    found = report(steps=steps, steps_before=before, examples=164, examples_before=100)
    assert speed_words(found).startswith(words)

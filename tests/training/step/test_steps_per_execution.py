"""Tests how the number of steps of an execution follows from measured times."""

from __future__ import annotations

import pytest

from tfmulti.training.step.steps_per_execution import CALL_S, TARGET_S, TRIALS, StepsPerExecution

COMPILED_S = 1.0


def measured(
    step_s: float, outside_s: float, steps_left: int, *, most: int | None = None
) -> StepsPerExecution:
    """Returns a chosen number after its trials. The first was compiled and took a second."""
    chosen = StepsPerExecution(None, maximum=most)
    for number in range(TRIALS + 2):
        inside_s = COMPILED_S if number == 0 else step_s - outside_s
        chosen.add(inside_s + outside_s, inside_s, steps_left)
        assert chosen.at_once == 1
    return chosen


def test_a_given_number_stays() -> None:
    chosen = StepsPerExecution(7)
    for _ in range(TRIALS + 5):
        chosen.add(0.001, 0.0005, 10**6)
    assert (chosen.at_once, chosen.wish) == (7, 0)


def test_an_execution_has_as_many_steps_as_fit_the_target_time() -> None:
    chosen = measured(0.002, 0.001 - CALL_S, 10**6)
    assert chosen.wish == pytest.approx(TARGET_S / 0.001, abs=1)
    # The number stays 1 until all workers agree.
    assert chosen.at_once == 1
    chosen.agree(0)
    assert chosen.at_once == 1
    chosen.agree(chosen.wish)
    assert chosen.at_once == pytest.approx(TARGET_S / 0.001, abs=1)
    assert chosen.wish == 0


def test_slow_steps_stay_single() -> None:
    assert measured(0.09, 0.001, 10**9).wish == 0


def test_a_short_run_is_not_worth_compiling() -> None:
    call_s = 0.001 + CALL_S
    enough = round(COMPILED_S / call_s * 1.1)
    assert measured(0.003, 0.001, enough).wish > 1
    assert measured(0.003, 0.001, round(enough * 0.8)).wish == 0
    assert measured(0.003, 0.001, 0).wish == 0


def test_an_execution_has_no_more_steps_than_between_two_checkpoints() -> None:
    assert measured(0.002, 0.001, 10**6, most=5).wish == 5
    assert measured(0.002, 0.001, 10**6, most=1).wish == 0

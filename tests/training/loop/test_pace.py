"""Tests how the number of steps of an execution follows from measured times."""

from __future__ import annotations

import pytest

from tfmulti.training.loop import stop_votes
from tfmulti.training.step.steps_per_execution import CALL_S, TARGET_S, TRIALS, StepsPerExecution

COMPILED_S = 1.0


def measured(
    step_s: float, outside_s: float, steps_left: int, *, most: int | None = None
) -> StepsPerExecution:
    """Returns a pace after its trials, of which the first was compiled and took a second."""
    pace = StepsPerExecution(None, most=most)
    for number in range(TRIALS + 2):
        inside_s = COMPILED_S if number == 0 else step_s - outside_s
        pace.add(inside_s + outside_s, inside_s, steps_left)
        assert pace.at_once == 1
    return pace


def test_a_given_number_stays() -> None:
    pace = StepsPerExecution(7)
    for _ in range(TRIALS + 5):
        pace.add(0.001, 0.0005, 10**6)
    assert (pace.at_once, pace.wish) == (7, 0)


def test_an_execution_has_as_many_steps_as_fit_the_target_time() -> None:
    pace = measured(0.002, 0.001 - CALL_S, 10**6)
    assert pace.wish == pytest.approx(TARGET_S / 0.001, abs=1)
    # The number stays 1 until all workers agree.
    assert pace.at_once == 1
    pace.agree(0)
    assert pace.at_once == 1
    pace.agree(pace.wish)
    assert pace.at_once == pytest.approx(TARGET_S / 0.001, abs=1)
    assert pace.wish == 0


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


@pytest.mark.parametrize("local_replicas", [1, 2, 8])
def test_only_the_chiefs_number_counts(local_replicas: int) -> None:
    chief = stop_votes.votes(False, None, pace=37)
    other = stop_votes.votes(False, None)
    counted = [local_replicas * (a + b) for a, b in zip(chief, other, strict=True)]
    assert stop_votes.agreed_pace(counted, local_replicas) == 37
    assert stop_votes.verdict(counted) is None
    assert not stop_votes.wants_checkpoint(counted)

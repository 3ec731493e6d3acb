"""Tests that random programs give the numbers of plain Keras, and that differences are seen."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.programs import search
from tests.programs.running import Left
from tests.support.places import TWO_REPLICAS, TWO_WORKERS, run_at

LIMIT_S = 900
PLAIN: Left = {"weight/0": np.array([1.0, 2.0])}
WRONG: Left = {"weight/0": np.array([1.0, 2.001])}
REFUSED: Left = {"error": np.array(["VerificationError", "verify: …"])}
ERROR: Left = {"error": np.array(["AttributeError", "…"])}


@pytest.mark.parametrize(
    ("plain", "found", "perturbed", "told", "verdict"),
    [
        (PLAIN, PLAIN, PLAIN, [], search.EQUAL),
        (PLAIN, {"weight/0": np.array([1.0, 2.00001])}, PLAIN, [], search.EQUAL),
        (PLAIN, WRONG, PLAIN, [], search.DIFFERS),
        (PLAIN, WRONG, PLAIN, ["a warning"], search.TOLD),
        (PLAIN, WRONG, WRONG, [], search.SENSITIVE),
        (PLAIN, WRONG, {**PLAIN, "weight/1": np.zeros(1)}, [], search.SENSITIVE),
        (PLAIN, REFUSED, PLAIN, [], search.REFUSED),
        (PLAIN, ERROR, PLAIN, [], search.FAILS),
        (ERROR, ERROR, ERROR, [], search.FAILS_IN_KERAS),
    ],
)
def test_a_program_is_judged(
    plain: Left, found: Left, perturbed: Left, told: list[str], verdict: str
) -> None:
    assert search.judged(plain, found, perturbed, told, tolerance=1e-4)[0] == verdict


def test_only_a_warning_for_users_tells_a_difference() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("a difference", stacklevel=1)
        warnings.warn("an old way", DeprecationWarning, stacklevel=1)
    assert search.messages(caught) == ["a difference"]


@pytest.mark.parametrize(("place", "first", "count"), [(TWO_REPLICAS, 0, 6), (TWO_WORKERS, 6, 2)])
def test_random_programs_have_the_numbers_of_plain_keras(
    place: str, first: int, count: int, tmp_path: Path
) -> None:
    argv = ["-m", "tests.programs.search", place, str(first), str(count)]
    run_at(place, argv, tmp_path, limit_s=LIMIT_S)

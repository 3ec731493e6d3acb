"""Tests that any number of replicas and workers compute the numbers of one device.

`pytest tests/exactness --write-table` writes the differences to docs/exactness.md and
docs/exactness.json; `pytest -m core` runs one case of each kind.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.exactness import table
from tests.exactness.running import CasePlaces
from tests.support.cases import CASES, CORE, CORE_PLACES
from tests.support.comparing import largest_difference

AT_PLACES = [
    pytest.param(name, place, marks=[pytest.mark.core] * (name in CORE and place in CORE_PLACES))
    for name, case in CASES.items()
    for place in case.places
]


@pytest.mark.parametrize(("case", "place"), AT_PLACES)
def test_the_numbers_of_one_device(
    places: CasePlaces, measured: table.Found, case: str, place: str
) -> None:
    first, *others = [found[case] for found in places[place]]
    # All workers have the same values, to the bit.
    for other in others:
        assert other.keys() == first.keys()
        assert all(np.array_equal(first[name], other[name], equal_nan=True) for name in first)
    expected = places[CASES[case].compare][0][case]
    difference = largest_difference(first, expected)
    measured.setdefault(case, {})[place] = difference
    assert difference <= CASES[case].tolerance
    if place == "one_device" and "microbatches" not in CASES[case].prepare:
        assert difference <= CASES[case].alone


def test_the_table_in_readme_is_of_these_cases() -> None:
    found = json.loads(table.FILE.read_text())
    assert list(found) == list(CASES), "run: pytest tests/exactness --write-table"
    assert table.is_whole(found)
    assert table.of_promises(found) in table.PAGE.read_text()
    for name, case in CASES.items():
        assert all(difference <= case.tolerance for difference in found[name].values())


@pytest.mark.parametrize("row", table.PROMISES)
def test_each_kind_of_case_runs_at_each_kind_of_place(row: int) -> None:
    """This holds in CI, too, where a case runs at a few places only."""
    cases = [case for case in CASES.values() if case.row == row]
    kinds = {place.partition("-")[0] for case in cases for place in case.places}
    assert kinds == {"one_device", "mirrored", "workers"}

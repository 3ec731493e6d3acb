"""Two and three workers, each a real process: the numbers of Keras alone, alike on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.cases import CASES
from tests.support.comparing import largest_difference

WORKERS = pytest.mark.parametrize("workers", [2, 3])


@WORKERS
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_of_one_device(cases: Callable[..., Any], case: str, workers: int) -> None:
    found = cases("multi_worker_mirrored", workers)
    assert len(found) == workers
    assert largest_difference(found[0][case], cases("plain")[0][case]) <= 1e-6


@WORKERS
@pytest.mark.parametrize("case", CASES)
def test_all_workers_have_the_same(cases: Callable[..., Any], case: str, workers: int) -> None:
    first, *others = cases("multi_worker_mirrored", workers)
    for other in others:
        assert other[case].keys() == first[case].keys()
        assert all(np.array_equal(first[case][n], other[case][n]) for n in first[case])

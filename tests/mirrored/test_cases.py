"""One device, and replicas of one process: the numbers of Keras alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.cases import CASES, IN_ALL_SIZES
from tests.support.comparing import largest_difference


@pytest.mark.parametrize("case", CASES)
def test_one_device_is_keras_to_the_bit(cases: Callable[..., Any], case: str) -> None:
    ours, keras_alone = cases("one_device")[0][case], cases("plain")[0][case]
    assert ours.keys() == keras_alone.keys()
    assert all(np.array_equal(ours[name], keras_alone[name]) for name in ours)


@pytest.mark.parametrize("case", CASES)
def test_two_replicas(cases: Callable[..., Any], case: str) -> None:
    assert largest_difference(cases("mirrored", 2)[0][case], cases("plain")[0][case]) <= 1e-6


@pytest.mark.parametrize("replicas", [3, 8])
@pytest.mark.parametrize("case", IN_ALL_SIZES)
def test_more_replicas(cases: Callable[..., Any], case: str, replicas: int) -> None:
    ours = cases("mirrored", replicas)[0][case]
    assert largest_difference(ours, cases("plain")[0][case]) <= 1e-6


def test_training_changed_the_weights(cases: Callable[..., Any]) -> None:
    """Guards the comparisons above: runs of different optimizers are far apart."""
    found = cases("plain")[0]
    sgd, adam = found["functional-sgd"], found["functional-adam"]
    assert np.abs(sgd["weight/0"] - adam["weight/0"]).max() > 1e-3
    assert sgd["history/loss"][-1] < sgd["history/loss"][0]

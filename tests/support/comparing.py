"""Measures the difference between the results of two runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def largest_difference(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> float:
    """Returns the largest absolute difference over all arrays, relative to the largest weight.

    An array with larger values, such as a loss that is a sum or a slot that counts steps, is
    compared relative to its own largest value. The difference is infinite if only one side has a
    NaN, or if names or shapes differ.
    """
    if left.keys() != right.keys():
        return float("inf")
    weights = [np.abs(a).max() for name, a in left.items() if name.startswith("weight/")]
    scale = float(max(weights))
    worst = 0.0
    for name, a in left.items():
        b = right[name]
        if a.shape != b.shape or not np.array_equal(np.isnan(a), np.isnan(b)):
            return float("inf")
        gap = np.abs(np.nan_to_num(a.astype(np.float64)) - np.nan_to_num(b.astype(np.float64)))
        own = max(scale, float(np.nan_to_num(np.abs(a)).max(initial=0.0)))
        worst = max(worst, float(gap.max(initial=0.0)) / own)
    return worst


def assert_the_same_losses(found: dict[str, Any], one: dict[str, Any], replicas: int) -> None:
    """Checks that the report of a run has the losses of the run on one device.

    Args:
        found: the report of the run.
        one: the report of the run on one device.
        replicas: how many replicas the run must have had.
    """
    assert found["replicas"] == replicas
    for name, values in one["history"].items():
        assert found["history"][name] == pytest.approx(values, rel=1e-4)

"""Measures the difference between the results of two runs."""

from __future__ import annotations

import numpy as np


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

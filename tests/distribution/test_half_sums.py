"""Tests compressed gradients of more than two workers, whose sums depend on the rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.behaviours import behaviour, numbers
from tests.support.places import THREE_WORKERS

pytestmark = pytest.mark.multiworker


def rounded(values: np.ndarray, digits: int) -> np.ndarray:
    """Returns values rounded to `digits` binary digits, to the nearest, ties to even."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.round(mantissa * 2.0**digits), exponent - digits)


@behaviour(numbers.sums_of_compressed_gradients, at=[THREE_WORKERS])
@pytest.mark.parametrize(("name", "digits"), [("none", 24), ("float16", 11), ("bfloat16", 8)])
def test_compressed_gradients_are_added_in_float32(
    results: list[Any], name: str, digits: int
) -> None:
    """They are rounded before they are sent, and again after all of them are added."""
    shares = [
        np.random.default_rng(rank).standard_normal([40, 50]).astype(np.float32)
        for rank in range(len(results))
    ]
    total = rounded(sum(rounded(share, digits) for share in shares), digits)
    for worker in results:
        large, many_digits, rows = worker[name]
        # Numbers of bfloat16 are 16 apart here.
        assert large == [[2048 if name == "bfloat16" else 2050] * 2] * 2
        assert np.abs(np.array(many_digits) - total).max() <= (1e-6 if name == "none" else 0)
        assert rows == [[3, 3], [0, 0], [0, 0]]


@behaviour(numbers.training_with_compressed_gradients, at=[THREE_WORKERS])
def test_training_with_compressed_gradients_is_alike_on_all_workers(results: list[Any]) -> None:
    assert results[1:] == results[:-1]
    found = {
        name: np.concatenate([np.ravel(weight) for weight in weights])
        for name, weights in results[0].items()
    }
    for name, digits in (("float16", 11), ("bfloat16", 8)):
        assert 0 < np.abs(found[name] - found["none"]).max() < 2.0**-digits

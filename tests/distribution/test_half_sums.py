"""Gradients in half the bytes of more than two workers, where it matters how they are added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.multiworker

Workers = Callable[[int], list[dict[str, Any]]]
WORKERS = 3


def rounded(values: np.ndarray, digits: int) -> np.ndarray:
    """Returns values rounded to so many binary digits, to the nearest, ties to even."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.round(mantissa * 2.0**digits), exponent - digits)


@pytest.mark.parametrize(("name", "digits"), [("none", 24), ("float16", 11), ("bfloat16", 8)])
def test_they_are_added_in_float32(workers: Workers, name: str, digits: int) -> None:
    """Rounded before they travel and after they are added, and not in between."""
    shares = [
        np.random.default_rng(rank).standard_normal([40, 50]).astype(np.float32)
        for rank in range(WORKERS)
    ]
    total = rounded(sum(rounded(share, digits) for share in shares), digits)
    for worker in workers(WORKERS):
        large, many, rows = worker["sums_in_half_the_bytes"][name]
        assert large == [[2048 if name == "bfloat16" else 2050] * 2] * 2  # bfloat16: 16 apart
        assert np.abs(np.array(many) - total).max() <= (1e-6 if name == "none" else 0)
        assert rows == [[3, 3], [0, 0], [0, 0]]


def test_training_with_them_is_alike_on_all(workers: Workers) -> None:
    trained = [worker["gradients_in_half_the_bytes"] for worker in workers(WORKERS)]
    assert trained[1:] == trained[:-1]
    found = {
        name: np.concatenate([np.ravel(weight) for weight in weights])
        for name, weights in trained[0].items()
    }
    for name, digits in (("float16", 11), ("bfloat16", 8)):
        assert 0 < np.abs(found[name] - found["none"]).max() < 2.0**-digits

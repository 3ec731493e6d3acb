"""Tests how many numbers of a variable the workers compare."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tfmulti.training.loop.same_weights import _checksum


@pytest.mark.parametrize(("size", "all_numbers"), [(9_000, False), (90_000, True)])
def test_one_other_number_is_found(size: int, all_numbers: bool) -> None:
    value = np.zeros([size // 10, 10], "float32")
    variable = keras.Variable(value)
    before = _checksum(variable, all_numbers)
    value[-1, -1] = 1.0
    variable.assign(value)
    assert _checksum(variable, all_numbers) != before


def test_other_values_of_a_large_variable_are_found_by_some_of_them() -> None:
    variable = keras.Variable(np.zeros([300, 300], "float32"))
    before = _checksum(variable, False)
    variable.assign(variable + 1e-6)
    assert _checksum(variable, False) != before

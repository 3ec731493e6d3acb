"""Tests that sample weights must have the form of the targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tfmulti.errors import DataError
from tfmulti.training.input.feed import array_source

ROWS = np.ones((6, 2), np.float32)
WEIGHTS = np.ones(6, np.float32)


@pytest.mark.parametrize(
    "weights",
    [{"a": WEIGHTS}, [WEIGHTS], [WEIGHTS, WEIGHTS], {"a": WEIGHTS, "b": WEIGHTS, "c": WEIGHTS}],
)
def test_weights_of_another_form_than_the_targets_are_refused(weights: Any) -> None:
    with pytest.raises(DataError, match=r"sample_weight has the form .* but y has the form"):
        array_source(ROWS, {"a": ROWS, "b": ROWS}, weights)


def test_a_list_of_weights_goes_with_a_tuple_of_targets() -> None:
    assert len(array_source(ROWS, (ROWS, ROWS), [WEIGHTS, WEIGHTS])) == 6
    assert len(array_source(ROWS, (ROWS, ROWS), WEIGHTS)) == 6

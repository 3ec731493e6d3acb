"""A small regression on random data: 100 rows of 10 values, with one target each."""

from __future__ import annotations

import numpy as np

from tfmulti.data.arrays import ArraySource
from tfmulti.data.data_set import REGRESSION, DataSet, DataSpec

_ROWS, _VALUES = 100, 10


def load(options: str, seed: int) -> DataSet:
    """Returns x [100, 10] and y [100, 1], both normal; y is linear in x, with noise.

    The validation and the test part have 20 rows each, drawn from the same distribution.
    """
    rng = np.random.default_rng(seed)
    slope = rng.standard_normal((_VALUES, 1)) / np.sqrt(_VALUES)

    def rows(count: int) -> ArraySource:
        x = rng.standard_normal((count, _VALUES))
        y = x @ slope + 0.1 * rng.standard_normal((count, 1))
        return ArraySource((x, y))

    spec = DataSpec((_VALUES,), "float32", REGRESSION, outputs=1)
    return DataSet(train=rows(_ROWS), validation=rows(20), test=rows(20), spec=spec)

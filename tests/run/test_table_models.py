"""Tests that a model of a table takes raw columns, also in plain Keras."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

from tfmulti.data.data_set import DataSpec
from tfmulti.run.models.building import model_input
from tfmulti.run.models.dense import mlp

pytestmark = pytest.mark.mirrored

ROWS = np.array([[1e6, 3e-9, 5, 1], [1e6 + 8, 1e-9, 5, 0]], np.float32)
MEAN, STD = (1e6 + 4, 2e-9, 5.0, 0.0), (4.0, 1e-9, 1.0, 1.0)
SPEC = DataSpec((4,), "float32", "classification", 2, input_mean=MEAN, input_std=STD)


@pytest.mark.parametrize("precision", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_columns_of_any_size_are_normalized(precision: str) -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(precision)
    try:
        inputs, x = model_input(SPEC)
    finally:
        keras.config.set_dtype_policy(before)
    found = keras.Model(inputs, x)(ROWS).numpy()
    assert found == pytest.approx(np.array([[-1, 1, 0, 1], [1, -1, 0, 0]]), abs=1e-6)


def test_the_saved_model_takes_raw_columns(tmp_path: Path) -> None:
    model = mlp(SPEC)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert np.array_equal(loaded.predict(ROWS, verbose=0), model.predict(ROWS, verbose=0))
    assert not np.array_equal(
        loaded.predict(ROWS, verbose=0)[0], loaded.predict(ROWS, verbose=0)[1]
    )

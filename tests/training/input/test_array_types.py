"""Tests that a step gets arrays in the types of plain Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from tfmulti import prepare

pytestmark = pytest.mark.mirrored


class TypeRecorder(keras.Model):
    """Records the types that its steps get."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.types: list[str] = []

    def train_step(self, data: Any) -> Any:
        self.types += [part.dtype.name for part in data]
        return super().train_step(data)

    def test_step(self, data: Any) -> Any:
        self.types += [part.dtype.name for part in data]
        return super().test_step(data)


@pytest.mark.parametrize("floatx", ["float32", "float64"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
def test_arrays_have_the_types_of_plain_keras(floatx: str, dtype: str) -> None:
    x = np.random.default_rng(1).random((12, 3)).astype(dtype)
    y = np.random.default_rng(2).random((12, 1))
    results = []
    before = keras.config.floatx()
    keras.config.set_floatx(floatx)
    try:
        for prepared in (False, True):
            keras.utils.set_random_seed(1)
            inputs = keras.Input((3,))
            model = TypeRecorder(inputs, keras.layers.Dense(1)(inputs))
            if prepared:
                prepare(model)
            model.compile("adam", "mse")
            options = {"batch_size": 4, "verbose": 0}
            history = model.fit(x, y, shuffle=False, validation_data=(x, y), **options).history
            predicted = model.predict(x, **options)
            results.append((sorted(set(model.types)), history, predicted.dtype, predicted.tolist()))
    finally:
        keras.config.set_floatx(before)
    assert results[0] == results[1]

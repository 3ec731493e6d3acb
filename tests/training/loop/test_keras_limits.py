"""Tests that the limits of keras.config for short runs hold as in plain Keras."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmulti import make_strategy, prepare

pytestmark = pytest.mark.skipif(
    not hasattr(keras.config, "set_max_epochs"), reason="this Keras has no limits"
)
X = np.arange(40.0, dtype=np.float32)[:, None] / 40.0
FORMS: dict[str, dict[str, Any]] = {
    "arrays": {"x": X, "y": X, "batch_size": 8},
    "arrays without a batch size": {"x": X, "y": X},
    "Dataset": {"x": tf.data.Dataset.from_tensor_slices((X, X)).batch(8)},
    "Dataset of unknown length": {
        "x": tf.data.Dataset.from_tensor_slices((X, X)).filter(lambda x, y: True).batch(8)
    },
}


@pytest.fixture(autouse=True)
def _without_limits() -> Iterator[None]:
    yield
    keras.config.set_max_epochs(None)
    keras.config.set_max_steps_per_epoch(None)


def numbers(form: str, steps: int | None, *, by_tfmulti: bool) -> list[Any]:
    """Returns what `fit`, `evaluate` and `predict` give, and the weights."""
    scope = make_strategy("one_device").scope() if by_tfmulti else contextlib.nullcontext()
    with scope:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        if by_tfmulti:
            prepare(model)
        model.compile("sgd", "mse")
    model.set_weights([np.ones((1, 1))])
    data = {"verbose": 0, **FORMS[form]}
    given: dict[str, Any] = {"epochs": 3, "shuffle": False, "steps_per_epoch": steps}
    history = model.fit(**data, **given, validation_data=(X, X), validation_batch_size=8).history
    evaluated = model.evaluate(**data)
    predicted = model.predict(data["x"], verbose=0, batch_size=data.get("batch_size"))
    return [history, evaluated, predicted, model.get_weights()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("epochs", "limit", "steps"),
    [(2, None, None), (None, 1, None), (None, 5, None), (None, 9, None), (2, 1, 5)],
)
def test_limits_hold_as_in_plain_keras(
    form: str, epochs: int | None, limit: int | None, steps: int | None
) -> None:
    keras.config.set_max_epochs(epochs)
    keras.config.set_max_steps_per_epoch(limit)
    found = numbers(form, steps, by_tfmulti=True)
    expected = numbers(form, steps, by_tfmulti=False)
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_warning_tells_the_limits() -> None:
    keras.config.set_max_epochs(1)
    keras.config.set_max_steps_per_epoch(2)
    with pytest.warns(UserWarning, match="limited to") as told:
        numbers("arrays", None, by_tfmulti=True)
    messages = {str(warning.message) for warning in told}
    assert "epochs=3 is limited to 1 by keras.config." in messages
    assert "the steps of an epoch are limited to 2 by keras.config." in messages

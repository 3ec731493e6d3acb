"""Tests whether the last layers of a user's model tell that its outputs are logits."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from tfmulti.errors import ModelError
from tfmulti.run.models import user

pytestmark = pytest.mark.mirrored


def ending_in(*layers: keras.layers.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((2,)), *layers])


@pytest.mark.parametrize(
    ("layers", "logits"),
    [
        ([keras.layers.Dense(3)], True),
        ([keras.layers.Dense(3), keras.layers.Activation("linear")], True),
        ([keras.layers.Dense(3, "softmax")], False),
        ([keras.layers.Dense(3), keras.layers.Softmax()], False),
        ([keras.layers.Dense(3), keras.layers.Activation("softmax")], False),
        ([keras.layers.Dense(3, "softmax"), keras.layers.Activation("linear")], False),
    ],
)
def test_the_last_layers_decide_whether_outputs_are_logits(layers: Any, logits: bool) -> None:
    assert user.ends_in_logits("mine:model", ending_in(*layers)) is logits


@pytest.mark.parametrize(
    "layers",
    [[keras.layers.Dense(3, "sigmoid")], [keras.layers.Dense(3), keras.layers.Dropout(0.1)]],
)
def test_a_model_with_unclear_outputs_is_refused(layers: Any) -> None:
    with pytest.raises(ModelError, match=r"does not tell .* Call model.compile\(optimizer, loss\)"):
        user.ends_in_logits("mine:model", ending_in(*layers))
    with pytest.raises(ModelError, match=r"its layers do not tell"):
        user.ends_in_logits("mine:model", keras.Model())

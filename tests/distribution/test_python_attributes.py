"""Tests which Python attributes each replica begins with."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tfmulti.distribution import python_attributes


class Scaled(keras.layers.Layer):
    """Finds its axis in `build`, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.axis, self.calls = -1, 0

    def build(self, shape: Any) -> None:
        self.axis = len(shape) - 1

    def call(self, inputs: Any) -> Any:
        self.calls += 1
        return inputs


class Critic(keras.Model):
    """Has no `build` of its own, and counts in several kinds of attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.rate, self.phase, self.is_first = 0, 1.0, "warm up", True

    def call(self, inputs: Any) -> Any:
        self.calls += 1
        self.rate, self.phase, self.is_first = 0.5, "train", False
        return inputs


def test_numbers_and_texts_are_restored_and_booleans_stay() -> None:
    model = Critic()
    before = python_attributes.read([model])
    assert python_attributes.first_change(before, of_booleans=True) is None
    assert python_attributes.first_change(before) is None
    model(np.ones([2, 3]))
    assert python_attributes.first_change(before) == "Critic.calls"
    assert python_attributes.first_change(before, of_booleans=True) == "Critic.is_first"
    python_attributes.restore(before)
    assert (model.calls, model.rate, model.phase, model.is_first) == (0, 1.0, "warm up", False)
    assert model.built
    model.is_first = True
    assert python_attributes.first_change(before, of_booleans=True) is None


def test_what_a_build_sets_stays() -> None:
    layer = Scaled()
    before = python_attributes.read([layer])
    layer(np.ones([2, 3]))
    python_attributes.restore(before)
    assert layer.axis == 1


def test_numbers_of_a_built_layer_are_restored() -> None:
    layer = Scaled()
    layer(np.ones([2, 3]))
    before = python_attributes.read([layer])
    layer(np.ones([2, 3]))
    python_attributes.restore(before)
    assert (layer.axis, layer.calls) == (1, 1)

"""Tests which Python attributes each replica begins with."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tfmulti.distribution import python_attributes

X = np.ones([2, 3])


class Critic(keras.Model):
    """Has no `build` of its own, and changes numbers and a text."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.rate, self.phase, self.missing = 0, 1, "warm up", float("nan")

    def call(self, inputs: Any) -> Any:
        self.calls += 1
        self.rate, self.phase = 0.5, "train"
        return inputs


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


class InitializedByFlag(keras.layers.Layer):
    """Finds its width in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.is_ready = 0, False

    def call(self, inputs: Any) -> Any:
        if not self.is_ready:
            self.width, self.is_ready = inputs.shape[-1], True
        return inputs


class Config:
    """Is no layer, and has a text where layers have a method."""

    build = "v1"

    def __init__(self) -> None:
        self.steps = 0


def test_numbers_and_texts_are_restored() -> None:
    model = Critic()
    before = python_attributes.read([model])
    model(X)
    assert python_attributes.first_change(before) == "Critic.calls"
    python_attributes.restore(before)
    assert (model.calls, model.rate, model.phase, model.built) == (0, 1, "warm up", True)
    assert python_attributes.first_change(before) is None


def test_numbers_of_any_object_are_restored() -> None:
    config = Config()
    with python_attributes.kept([config]):
        config.steps += 1
    assert config.steps == 0


class Counted:
    steps = 0


def test_a_number_that_the_class_gives_is_restored() -> None:
    class More(Counted):
        """Inherits its number."""

    counted = More()
    before = python_attributes.read([counted])
    counted.steps += 1
    assert python_attributes.first_change(before) == "More.steps"
    python_attributes.restore(before)
    assert counted.steps == 0


def test_what_a_build_sets_stays() -> None:
    layer = Scaled()
    with python_attributes.kept([layer]):
        layer(X)
    assert layer.axis == 1
    with python_attributes.kept([layer]):
        layer(X)
    assert (layer.axis, layer.calls) == (1, 1)


def test_a_layer_that_has_initialized_itself_stays() -> None:
    layer = InitializedByFlag()
    before = python_attributes.read([layer])
    layer(X)
    python_attributes.restore(before)
    assert (layer.width, layer.is_ready) == (3, True)

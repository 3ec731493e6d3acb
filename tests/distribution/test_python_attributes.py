"""Tests which Python attributes each replica begins with."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

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


def twice(x: Any) -> Any:
    return 2 * x


class Configured(keras.layers.Layer):
    """Reads values of all kinds in its `call`, and one only in another place."""

    def __init__(self) -> None:
        super().__init__()
        self.flag, self.scale, self.function = False, None, twice
        self.table, self.options, self.sizes = np.ones(3), {"power": 1}, [1, 2]
        self.notes: Any = None
        self.odd, self.helper = np.array([1.0, np.nan]), None

    def note(self) -> Any:
        return self.notes

    def helped(self) -> Any:
        return self.helper

    def call(self, x: Any) -> Any:
        self.helped()
        return [
            x,
            self.odd,
            self.flag,
            self.scale,
            self.function,
            self.table,
            self.options,
            self.sizes,
        ]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda layer: setattr(layer, "flag", True), "flag"),
        (lambda layer: setattr(layer, "scale", 2.0), "scale"),
        (lambda layer: setattr(layer, "function", np.abs), "function"),
        (lambda layer: layer.table.fill(0.0), "table"),
        (lambda layer: layer.options.update({"power": 2}), "options"),
        (lambda layer: layer.sizes.__setitem__(0, 3), "sizes"),
        (lambda layer: layer.sizes.append(3), None),
        (lambda layer: layer.options.update({"a": layer.options}), None),
        (lambda layer: setattr(layer, "odd", np.array([1.0, np.nan])), None),
        (lambda layer: setattr(layer, "helper", twice), "helper"),
        (lambda layer: setattr(layer, "notes", "read by a method that no step calls"), None),
        (lambda layer: setattr(layer, "table", np.ones(3)), None),
        (lambda layer: layer(np.ones(2)), None),
    ],
)
def test_a_changed_value_that_a_step_may_read_is_found(change: Any, name: str | None) -> None:
    layer = Configured()
    before = python_attributes.read_for_steps([layer])
    assert python_attributes.first_new_value(before) is None
    change(layer)
    found = python_attributes.first_new_value(before)
    assert found == (name and f"Configured.{name} of {layer.name!r}")


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (lambda: keras.layers.Dense(1, "relu"), "activation", keras.activations.tanh),
        (lambda: keras.optimizers.SGD(), "clipnorm", 0.1),
        (lambda: keras.layers.Normalization(), "mean", tf.zeros(2)),
    ],
)
def test_a_changed_setting_of_keras_is_found(make: Any, name: str, value: Any) -> None:
    owner = make()
    before = python_attributes.read_for_steps([owner])
    setattr(owner, name, value)
    found = python_attributes.first_new_value(before)
    assert found is not None
    assert found.startswith(f"{type(owner).__name__}.{name}")


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

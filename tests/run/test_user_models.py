"""Tests what a user's model tells about its outputs and its input."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import pytest

from tfmulti.data.data_set import CLASSIFICATION, DataSpec
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


DIGITS = DataSpec((8, 8, 1), "uint8", CLASSIFICATION, 10)


@pytest.mark.parametrize("shape", [(20,), (8, 8, 3), (64,), ()])
def test_an_input_of_another_shape_than_the_data_is_refused(shape: tuple[int, ...]) -> None:
    model = keras.Sequential([keras.Input(shape), keras.layers.Identity()])
    with pytest.raises(ModelError) as caught:
        user.check_input("mine:model", model, DIGITS, "digits")
    assert str(caught.value) == (
        f"--model mine:model takes examples of shape {shape}, but those of --dataset digits have "
        "shape (8, 8, 1) (8×8×1, 10 classes). Give the --dataset of this model, or change its "
        "Input."
    )


@pytest.mark.parametrize("shape", [(8, 8, 1), (8, 8), (None, None, 1), (8, None)])
def test_an_input_that_keras_fits_to_the_data_is_taken(shape: tuple[int | None, ...]) -> None:
    model = keras.Sequential([keras.Input(shape), keras.layers.Identity()])
    user.check_input("mine:model", model, DIGITS, "digits")
    # Keras takes it as well.
    assert model(keras.ops.zeros((2, 8, 8, 1))).shape[0] == 2


@pytest.mark.parametrize(
    ("shape", "example"),
    [((1, 1), (1,)), ((10, 1, 1), (10, 1)), ((1,), (1, 1)), ((4, 1), (4, 1, 1))],
)
def test_one_axis_of_one_value_is_added_or_removed(
    shape: tuple[int, ...], example: tuple[int, ...]
) -> None:
    model = keras.Sequential([keras.Input(shape), keras.layers.Identity()])
    user.check_input("m:m", model, dataclasses.replace(DIGITS, input_shape=example), "mine:data")
    assert model(keras.ops.zeros((2, *example))).shape[0] == 2


def test_an_attribute_of_a_subclass_says_nothing_about_its_input() -> None:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.input_shape = (3, 3)

    user.check_input("mine:model", Model(), DIGITS, "digits")


def test_only_a_single_input_of_a_known_shape_is_compared() -> None:
    inputs = [keras.Input((2,)), keras.Input((3,))]
    for model in (
        keras.Sequential([keras.layers.Identity()]),
        keras.Model(inputs, keras.layers.Concatenate()(inputs)),
        keras.Model(),
    ):
        user.check_input("mine:model", model, DIGITS, "digits")
    user.check_input("mine:model", ending_in(), None, "mine:data")

"""Tests the parts that are built before a step, and the error of data that does not fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmulti

pytestmark = pytest.mark.mirrored


class Own(keras.Model):
    """A model whose layers are given, and that tells no shape of its inputs."""

    def __init__(self, first: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.last = first, keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.last(self.first(x))


def fitted(first: Callable[[Any], Any], x: np.ndarray, outputs: int = 2) -> None:
    model = Own(first)
    model.compile("sgd", "mse")
    tfmulti.prepare(model)
    model.fit(x, np.zeros((len(x), outputs), np.float32), batch_size=4, verbose=0)


def taking(inputs: int) -> keras.layers.Layer:
    layer = keras.layers.Dense(4)
    layer.build((None, inputs))
    return layer


IMAGES = np.zeros((8, 5, 5, 1), np.uint8)


@pytest.mark.parametrize(
    ("first", "x", "reason"),
    [
        (taking(784), np.zeros((8, 64), np.float32), "expected axis -1 of input shape to have"),
        (keras.layers.Conv2D(4, 3), IMAGES, "has DataType uint8 not in list of allowed values"),
        (lambda x: keras.ops.reshape(x, (-1, 7)), IMAGES, "must be evenly divisible by 7 but is 1"),
    ],
    ids=["shape", "type", "size"],
)
def test_a_batch_that_a_model_cannot_compute_is_told_in_one_line(
    first: Callable[[Any], Any], x: np.ndarray, reason: str
) -> None:
    with pytest.raises(tfmulti.ModelError) as caught:
        fitted(first, x)
    message = str(caught.value)
    shape = re.escape(f"{(4, *x.shape[1:])} {x.dtype}")
    start = rf"Own cannot compute a batch of inputs {shape}: .*{re.escape(reason)}.*"
    end = r" \(test_model_checks.py:\d+\)\. Change the model or the data\."
    assert re.fullmatch(start + end, message), message
    assert "\x1b" not in message


class KeepsTable(Own):
    """Makes a variable from what a layer computes, as retrieval models of KerasRS do."""

    def build(self, shape: Any) -> None:
        first = self.first(np.ones((2, 3), np.float32))
        self.table = keras.Variable(first, trainable=False)
        self.built = True


def test_a_variable_that_build_makes_from_a_tensor_is_told() -> None:
    model = KeepsTable(keras.layers.Dense(4))
    model.compile("sgd", "mse")
    tfmulti.prepare(model)
    x = np.ones((4, 3), np.float32)
    advice = r"Call the model on a batch before fit, and Keras makes the variable\.$"
    with pytest.raises(tfmulti.ModelError, match=advice):
        model.fit(x, x[:, :2], verbose=0)
    called = KeepsTable(keras.layers.Dense(4))
    called(x)
    called.compile("sgd", "mse")
    tfmulti.prepare(called).fit(x, x[:, :2], verbose=0)


class BeginsWithFirstRows(keras.layers.Layer):
    """Subtracts the mean of the first batch, which a condition assigns."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=shape[1:], trainable=False)
        self.has_begun = self.add_weight(trainable=False)

    def call(self, x: Any) -> Any:
        def first() -> int:
            self.mean.assign(tf.reduce_mean(x, axis=0))
            return 0

        tf.cond(self.has_begun > 0, lambda: 0, first)
        self.has_begun.assign(1)
        return x - self.mean


class ChoosesFirstRows(BeginsWithFirstRows):
    """Does the same as the message advises."""

    def call(self, x: Any) -> Any:
        mean = tf.reduce_mean(x, axis=0)
        self.mean.assign(keras.ops.where(self.has_begun > 0, self.mean, mean))
        self.has_begun.assign(1)
        return x - self.mean


def test_a_variable_that_a_condition_assigns_is_told() -> None:
    x = np.ones((8, 3), np.float32)
    reason = "a condition or a loop on tensors assigns a variable that is read after it"
    advice = re.escape("variable.assign(keras.ops.where(…, new, variable)).")
    with pytest.raises(tfmulti.ModelError, match=f"{reason}.*{advice}$"):
        fitted(BeginsWithFirstRows(), x)
    fitted(ChoosesFirstRows(), x)


def test_an_error_that_does_not_come_from_the_data_stays() -> None:
    def fails(x: Any) -> Any:
        return x.no_such_attribute

    with pytest.raises(AttributeError, match="no_such_attribute"):
        fitted(fails, IMAGES)


def test_an_error_of_tfmulti_stays() -> None:
    def fails(x: Any) -> Any:
        raise tfmulti.ModelError("take another layer.")

    with pytest.raises(tfmulti.ModelError, match=r"^take another layer\.$"):
        fitted(fails, IMAGES)


class OwnTest(keras.Model):
    """Evaluates without the compiled losses, and counts the traces."""

    traces = 0

    def test_step(self, data: Any) -> Any:
        OwnTest.traces += 1
        x, y = data
        return {"error": keras.ops.mean(keras.ops.square(self(x)["first"] - y["first"]))}


def test_an_evaluation_without_the_compiled_losses_is_traced_once_more() -> None:
    """The first trace shows that the step computes no loss. Later calls trace nothing."""
    x = np.ones((8, 2), np.float32)
    inputs = keras.Input((2,))
    model = OwnTest(inputs, {name: keras.layers.Dense(2)(inputs) for name in ("first", "second")})
    model.compile(loss={"first": "mse", "second": "mae"})
    tfmulti.prepare(model)
    for _ in range(3):
        found = model.evaluate(x, {"first": x, "second": x}, verbose=0, return_dict=True)
        assert list(found) == ["error"]
    assert OwnTest.traces == 2

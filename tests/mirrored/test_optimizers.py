"""Each optimizer of the command is Keras' own, with the rate and the decay that were asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmulti import prepare, registry
from tfmulti.config import FitConfig
from tfmulti.optimizers import make_optimizer

CLASSES = {
    "sgd": keras.optimizers.SGD,
    "adam": keras.optimizers.Adam,
    "adamw": keras.optimizers.AdamW,
    "lamb": keras.optimizers.Lamb,
    "adafactor": keras.optimizers.Adafactor,
    "lion": keras.optimizers.Lion,
    "muon": keras.optimizers.Muon,
}


@pytest.mark.parametrize("name", registry.OPTIMIZERS)
def test_an_optimizer_by_its_name(name: str) -> None:
    config = FitConfig(optimizer=name, learning_rate=0.25, weight_decay=0.5)
    made = make_optimizer(config, global_batch_size=8, total_steps=10)
    assert type(made) is CLASSES[name]
    assert float(made.learning_rate) == 0.25
    assert made.weight_decay == 0.5


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_without_a_decay_it_is_keras_own(name: str) -> None:
    config = dataclasses.replace(FitConfig(learning_rate=0.25), optimizer=name)
    made = make_optimizer(config, global_batch_size=8, total_steps=10)
    assert made.weight_decay == CLASSES[name]().weight_decay


class OwnSGD(keras.optimizers.SGD):
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(2.0 * tf.convert_to_tensor(gradient), variable, learning_rate)


KERNELS = {"ResourceApplyKerasMomentum", "ResourceApplyGradientDescent"}


def trained(optimizer: keras.optimizers.Optimizer, *, prepared: bool) -> tuple[list[Any], set[str]]:
    """Returns weights and slots after two steps, and the kinds of what the second one runs."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Embedding(50, 4)])
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dense(5))
    for number, weight in enumerate(model.weights):
        rng = np.random.default_rng(number)
        weight.assign(rng.standard_normal(weight.shape))
    if prepared:
        prepare(model)
    model.compile(optimizer, "mse")
    x, y = np.arange(12).reshape(4, 3), np.ones((4, 5))
    if prepared:
        model.make_train_function()  # the optimizer is tfmulti's from here on

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, [w.value for w in weights]), weights)

    optimizer.build(model.trainable_variables)
    graph = step.get_concrete_function().graph
    step()
    step()
    values = [v.numpy() for v in (*model.weights, *optimizer.variables)]
    return values, {operation.type for operation in graph.get_operations()}


@pytest.mark.parametrize(
    ("make", "by_kernel"),
    [
        (lambda: keras.optimizers.SGD(0.1), True),
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), True),
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1), True),
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, clipnorm=0.5), True),
        (lambda: OwnSGD(0.1, momentum=0.9), False),
        (lambda: keras.optimizers.Adam(0.1), False),
    ],
)
def test_sgd_by_its_kernel_has_the_same_bits(make: Any, by_kernel: bool) -> None:
    """Of dense gradients; an SGD with an `update_step` of its own keeps that."""
    expected, _ = trained(make(), prepared=False)
    found, kinds = trained(make(), prepared=True)
    assert bool(kinds & KERNELS) == by_kernel
    for mine, true in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, true)

"""Each optimizer of the command is Keras' own, with the rate and the decay that were asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmulti import registry, updates
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
        super().update_step(2.0 * gradient, variable, learning_rate)


SLOTS = [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}]


def rows_of_a_table(values: np.ndarray) -> tf.IndexedSlices:
    """Returns an embedding's gradient: some rows twice, others not at all."""
    places = np.arange(len(values)) // 2
    return tf.IndexedSlices(tf.constant(values), tf.constant(places), tf.constant(values.shape))


@pytest.mark.parametrize(
    ("options", "form"),
    [(options, tf.constant) for options in ({}, *SLOTS)]
    + [(options, rows_of_a_table) for options in SLOTS],
)
def test_sgds_kernel_has_the_numbers_of_its_formula(
    options: dict[str, Any], form: Callable[[np.ndarray], Any]
) -> None:
    rng = np.random.default_rng(0)
    first, *gradients = rng.standard_normal((4, 33, 7)).astype(np.float32)
    found = []
    for by_kernel in (False, True):
        variable = keras.Variable(first)
        optimizer = keras.optimizers.SGD(0.1, **options)
        optimizer.build([variable])
        for gradient in map(form, gradients):
            if by_kernel:
                slots = list(optimizer.momentums)
                assert updates.update(optimizer, gradient, [variable, *slots], 0.1)
            else:
                optimizer.update_step(gradient, variable, 0.1)
        found.append([v.numpy() for v in (variable, *optimizer.momentums)])
    for mine, true in zip(*found, strict=True):
        assert np.abs(mine - true).max() <= 2e-7 * np.abs(true).max()


def test_what_the_kernel_does_not_know_is_left_alone() -> None:
    variable = keras.Variable(np.ones((3, 2), np.float32))
    optimizer = keras.optimizers.SGD(0.1)
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), tf.constant([3, 2]))
    assert not updates.update(optimizer, rows, [variable], 0.1)
    assert not updates.update(optimizer, tf.ones([3, 2], tf.float64), [variable], 0.1)
    np.testing.assert_array_equal(variable.numpy(), 1)
    assert updates.knows(optimizer.update_step)
    assert not updates.knows(OwnSGD(0.1).update_step)
    assert not updates.knows(keras.optimizers.Adam(0.1).update_step)

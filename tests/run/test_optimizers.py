"""Tests that the optimizers of the command are Keras' own, with the given rate and decay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmulti.config import registry
from tfmulti.config.fit_config import FitConfig
from tfmulti.keras_patches.cpu_speed import updates
from tfmulti.run.optimizers import make_optimizer

pytestmark = pytest.mark.mirrored

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
    """Returns the gradient of an embedding, with some rows twice and others missing."""
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
                assert updates.sgd(optimizer, gradient, [variable, *slots], 0.1)
            else:
                optimizer.update_step(gradient, variable, 0.1)
        found.append([v.numpy() for v in (variable, *optimizer.momentums)])
    for mine, true in zip(*found, strict=True):
        assert np.abs(mine - true).max() <= 2e-7 * np.abs(true).max()


def test_what_the_kernel_does_not_know_is_left_alone() -> None:
    variable = keras.Variable(np.ones((3, 2), np.float32))
    optimizer = keras.optimizers.SGD(0.1)
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), tf.constant([3, 2]))
    assert not updates.sgd(optimizer, rows, [variable], 0.1)
    assert not updates.sgd(optimizer, tf.ones([3, 2], tf.float64), [variable], 0.1)
    np.testing.assert_array_equal(variable.numpy(), 1)
    assert updates.of_step(optimizer.update_step) is updates.sgd
    assert updates.of_step(OwnSGD(0.1).update_step) is None
    assert updates.of_step(keras.optimizers.Nadam(0.1).update_step) is None


@pytest.mark.parametrize("cls", [keras.optimizers.Adam, keras.optimizers.AdamW])
def test_adams_update_is_that_of_keras_to_the_bit(cls: Any) -> None:
    rng = np.random.default_rng(0)
    first, second, *gradients = rng.standard_normal((5, 33, 7)).astype(np.float32)
    found = []
    for by_updates in (False, True):
        variables = [keras.Variable(first), keras.Variable(second)]
        optimizer = cls(0.1, beta_1=0.85, epsilon=1e-3)
        optimizer.build(variables)
        for gradient in map(tf.constant, gradients):
            with updates.of_all_variables() as once:
                for i, variable in enumerate(variables):
                    slots = [optimizer._momentums[i], optimizer._velocities[i]]
                    if by_updates:
                        update = updates.of_step(optimizer.update_step)
                        assert update is not None
                        assert update(optimizer, gradient * (i + 1), [variable, *slots], 0.1)
                        # One operation serves both variables.
                        assert len(once) == 1
                    else:
                        optimizer.update_step(gradient * (i + 1), variable, 0.1)
            optimizer.iterations.assign_add(1)
        found.append([v.numpy() for v in (*variables, *optimizer.variables)])
    for mine, true in zip(*found, strict=True):
        np.testing.assert_array_equal(mine, true)


def test_an_adam_that_keeps_the_largest_velocity_is_left_alone() -> None:
    variable = keras.Variable(np.ones(3, np.float32))
    optimizer = keras.optimizers.Adam(0.1, amsgrad=True)
    assert not updates.adam(optimizer, tf.ones(3), [variable] * 3, 0.1)
    np.testing.assert_array_equal(variable.numpy(), 1)

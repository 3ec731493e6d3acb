"""Each optimizer of the command is Keras' own, with the rate and the decay that were asked for."""

from __future__ import annotations

import dataclasses

import keras
import pytest

from tfmulti import registry
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

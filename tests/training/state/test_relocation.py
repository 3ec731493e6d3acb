"""Tests how a model is moved to its strategy, in a process with one device."""

from __future__ import annotations

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmulti import prepare
from tfmulti.distribution import strategies
from tfmulti.errors import ClusterError, ModelError
from tfmulti.training.state import model_search, relocation

pytestmark = pytest.mark.mirrored

TWO = '{"cluster": {"worker": ["h1:1", "h2:1"]}, "task": {"type": "worker", "index": 0}}'


def test_a_cluster_without_a_strategy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", TWO)
    monkeypatch.setattr(strategies, "_made", {})
    monkeypatch.setattr(strategies, "_alone", set())
    with pytest.raises(ClusterError, match=r"names 2 workers, .* tfmulti.make_strategy\(\)"):
        prepare(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
    strategies.make_strategy("one_device", ignore_cluster=True)
    prepare(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
    monkeypatch.setattr(strategies, "_alone", set())
    monkeypatch.setenv("TF_CONFIG", "{}")
    prepare(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))


def test_variables_are_found_wherever_they_are_kept() -> None:
    outside = tf.Variable(1.0)

    class Helper:
        __slots__ = ("kept",)

        def __init__(self) -> None:
            self.kept = {"a": [(tf.Variable(2.0), 3)]}

    class Held:
        __slots__ = ("__dict__", "variable")

        def __init__(self) -> None:
            self.variable = tf.Variable(3.0)

    class Finds(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.helper, self.held = Helper(), Held()
            self.layer = keras.layers.Dense(2)
            self.generator = keras.random.SeedGenerator(1)
            self.others = {"optimizer": keras.optimizers.SGD(0.1)}

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.layer(x) * outside

    model = Finds()
    model(np.zeros((1, 3), np.float32))
    state = model_search.find(model)
    names = set(state.named())
    for words in ("kept of Helper['a'][0][0]", "variable of Held", "outside"):
        assert any(words in name for name in names), names
    assert {v.name for v in state.variables} >= {
        "kernel",
        "bias",
        "seed_generator_state",
        "iteration",
        "learning_rate",
    }
    with relocation.on_one_device(state):
        assert model.helper.kept["a"][0][1] == 3
        model.helper.kept["a"][0][0].assign(9.0)
        model.held.variable.assign(9.0)
        outside.assign(9.0)
        model.layer.bias.assign([9.0, 9.0])
    assert float(model.helper.kept["a"][0][0]) == 2.0
    assert float(model.held.variable) == 3.0
    assert float(outside) == 1.0
    assert np.asarray(model.layer.bias).tolist() == [0.0, 0.0]


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step: tf.Tensor) -> float:
        return 0.5


class Layer(keras.layers.Layer):
    pass


def test_objects_of_users_are_found_without_schedules() -> None:
    """A schedule runs once for the replicas of a process, so no replica restores its numbers."""
    layer = Layer()
    model = keras.Sequential([keras.Input((2,)), layer, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(Halving()), "mse")
    state = model_search.find(model)
    assert any(isinstance(found, Halving) for found in state.objects)
    assert state.own_objects == [layer]


def test_a_variable_of_another_strategy_is_refused_with_the_two_lines_to_write() -> None:
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        variable = tf.Variable(1.0)
    words = r"'strategy = tfmulti.make_strategy\(\)' once, and 'with strategy.scope\(\):' around"
    with pytest.raises(ModelError, match=words):
        relocation._check_plain([variable])


OWN_STRATEGY = """
import sys
import keras, numpy as np, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
count = int(sys.argv[1])
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
from tfmulti import prepare
strategy = tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(count)])
for _ in range(2):
    model = prepare(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]))
    model.compile("sgd", "mse")
    model.fit(np.zeros((8, 3)), np.zeros((8, 2)), verbose=0)
"""


@pytest.mark.parametrize("count", [1, 2])
def test_a_model_in_no_scope_warns_once_if_there_are_several_devices(count: int) -> None:
    argv = [sys.executable, "-c", OWN_STRATEGY, str(count)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120)
    words = "the model trains on one of 2 devices, because it is in the scope of no strategy"
    assert done.stderr.count(words) == (count == 2)

"""Tests how TensorFlow optimizes the graphs of steps."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tfmulti import prepare
from tfmulti.keras_patches.tracing import optimized_once


def passes() -> tuple[bool, bool]:
    """Returns whether calls now skip the second iteration, and the search for large values."""
    config = tf.compat.v1.ConfigProto.FromString(
        context.context().function_call_options.config_proto_serialized
    )
    options = config.graph_options.rewrite_options
    is_once = options.meta_optimizer_iterations == options.ONE
    return is_once, options.memory_optimization == options.NO_MEM_OPT


def test_graphs_are_optimized_once_inside_the_context_alone() -> None:
    before = context.context().function_call_options
    with optimized_once():
        assert passes() == (True, True)
        inside = context.context().function_call_options.config_proto_serialized
    with optimized_once():
        # Other bytes would let TensorFlow optimize a function anew.
        assert context.context().function_call_options.config_proto_serialized == inside
    assert context.context().function_call_options is before
    assert passes() == (False, False)


def test_the_configuration_of_the_user_stays() -> None:
    before = context.context().function_call_options.config_proto_serialized
    with optimized_once():
        inside = context.context().function_call_options.config_proto_serialized
    changed = tf.compat.v1.ConfigProto.FromString(inside)
    changed.graph_options.rewrite_options.ClearField("meta_optimizer_iterations")
    changed.graph_options.rewrite_options.ClearField("memory_optimization")
    expected = tf.compat.v1.ConfigProto.FromString(before)
    expected.graph_options.rewrite_options.SetInParent()
    assert changed == expected


def test_nothing_changes_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind])
    with optimized_once():
        assert passes() == (False, False)


class Seen(keras.layers.Layer):
    """A layer that notes the passes of the call in which it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def call(self, x: Any) -> Any:
        self.found.append(passes())
        return x


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_steps_are_optimized_once(method: str) -> None:
    layer = Seen()
    model = keras.Sequential([keras.Input((2,)), layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    prepare(model, verify=False)
    layer.found.clear()
    x = np.ones((4, 2), np.float32)
    arguments = [x] if method == "predict" else [x, x[:, :1]]
    getattr(model, method)(*arguments, verbose=0)
    assert layer.found[-1] == (True, True)

"""Tests what the steps report: to the launcher and the watchdog, and as warnings to the user."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmulti
from tfmulti.launch.heartbeat import heartbeat
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step.step import warn_of_unknown

pytestmark = pytest.mark.mirrored


def model_of_one_device() -> keras.Model:
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        return tfmulti.prepare(keras.Sequential([keras.layers.Dense(1)]))


def test_predict_reports_each_batch() -> None:
    """So a long prediction does not look like one step that hangs."""
    began_s = []

    class Notes(keras.callbacks.Callback):
        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
            began_s.append(heartbeat().record().since_s)

    model_of_one_device().predict(np.ones([6, 2]), batch_size=2, callbacks=[Notes()], verbose=0)
    assert len(set(began_s)) == 3


@pytest.mark.parametrize(
    ("is_compared", "expected"),
    [
        (True, "verify has compared the first steps only"),
        (False, "Compare the first step"),
    ],
)
def test_a_passed_comparison_does_not_speak_for_later_steps(
    is_compared: bool, expected: str
) -> None:
    model = model_of_one_device()
    state = state_of(model)
    state.traced.compared = {"the operation 'o' (Foo)"} if is_compared else set()
    state.traced.unknown["train_step"] = {"the operation 'o' (Foo)": None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_unknown(model, "train_step")
    [message] = [str(warning.message) for warning in caught]
    assert not state.traced.unknown
    assert "the operation 'o' (Foo)" in message
    assert expected in message

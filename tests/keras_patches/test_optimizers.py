"""Tests optimizers that a loop or a callback of the user's own applies."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmulti

pytestmark = pytest.mark.mirrored
X = np.random.default_rng(3).random((8, 4)).astype(np.float32)


class Pulls(keras.callbacks.Callback):
    """Pulls the outputs of the model towards 0 after each batch, with an optimizer of its own."""

    def __init__(self, scope: Any) -> None:
        super().__init__()
        with scope:
            self.optimizer = keras.optimizers.Adam(0.01)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        weights = self.model.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.model(X) ** 2)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


def trained(strategy: tf.distribute.Strategy | None, scope: Any) -> list[np.ndarray]:
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    if strategy:
        tfmulti.prepare(model)
    callbacks = [Pulls(scope)]
    model.fit(X, X[:, :2], batch_size=4, shuffle=False, callbacks=callbacks, verbose=0)
    return list(model.get_weights())


def test_a_callback_may_apply_an_optimizer_that_was_made_in_the_scope() -> None:
    strategy = tfmulti.make_strategy("mirrored", replicas=2)
    for weights, of_keras in zip(
        trained(strategy, strategy.scope()), trained(None, contextlib.nullcontext()), strict=True
    ):
        np.testing.assert_allclose(weights, of_keras, rtol=1e-6, atol=1e-7)


def test_an_optimizer_that_was_made_outside_the_scope_is_refused() -> None:
    strategy = tfmulti.make_strategy("mirrored", replicas=2)
    message = (
        "the optimizer Adam updates the variable 'sequential.*/dense.*/kernel', but was made "
        "outside the strategy's scope. Make it in `with strategy.scope"
    )
    with pytest.raises(tfmulti.ModelError, match=message):
        trained(strategy, contextlib.nullcontext())

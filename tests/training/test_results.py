"""Tests that results have the names and the order of plain Keras."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmulti import prepare
from tfmulti.distribution.strategies import make_strategy

X = np.ones((8, 4), np.float32)
Y = X[:, :1]


class OwnLogs(keras.Model):
    """Its logs have other names, and another order, than its metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.first, self.second = keras.metrics.Mean("zeta"), keras.metrics.Mean("alpha")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.first, self.second]

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def test_step(self, data: Any) -> dict[str, Any]:
        self.first.update_state(1.0)
        self.second.update_state(2.0)
        second = self.second.result()
        return {"zeta": self.first.result(), "beta": 3.0 * second, "alpha": second}

    def train_step(self, data: Any) -> dict[str, Any]:
        return {**self.test_step(data), "about": "a text"}


def of_keras() -> keras.Model:
    layer = keras.layers.Dense(1, kernel_initializer="ones")
    return keras.Sequential([keras.Input((4,)), layer])


def plain_and_prepared(make: Any, **options: Any) -> Iterator[keras.Model]:
    """Yields a compiled model of plain Keras, and then the same one prepared."""
    for is_prepared in (False, True):
        with make_strategy("one_device").scope():
            model = prepare(make()) if is_prepared else make()
            model.compile("sgd", "mse", **options)
        yield model


@pytest.mark.parametrize("make", [of_keras, OwnLogs])
def test_evaluate_has_the_order_of_plain_keras(make: Any) -> None:
    results = []
    for model in plain_and_prepared(make, metrics=["mae", "cosine_similarity"]):
        named = model.evaluate(X, Y, verbose=0, return_dict=True)
        of_batch = model.test_on_batch(X, Y, return_dict=True)
        lists = [model.evaluate(X, Y, verbose=0), model.test_on_batch(X, Y)]
        results.append((list(named.items()), list(of_batch.items()), *lists))
    assert str(np.round(results[1][2:], 5)) == str(np.round(results[0][2:], 5))
    for plain, ours in zip(*(each[:2] for each in results), strict=True):
        assert [name for name, _ in ours] == [name for name, _ in plain]


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_history_has_the_order_of_plain_keras(eagerly: bool) -> None:
    models = plain_and_prepared(OwnLogs, run_eagerly=eagerly)
    plain, prepared = (model.fit(X, Y, verbose=0).history for model in models)
    assert list(prepared.items()) == list(plain.items())


class OtherLogs(OwnLogs):
    """Its logs have other names if the batches have no targets."""

    def train_step(self, data: Any) -> dict[str, Any]:
        logs = self.test_step(data)
        return {**logs, "count": 2.0} if len(data) == 2 else {"alpha": logs["zeta"]}


class OtherKinds(OwnLogs):
    """A log is not the result of a metric if the batches have no targets."""

    def train_step(self, data: Any) -> dict[str, Any]:
        logs = self.test_step(data)
        return logs if len(data) == 2 else {**logs, "alpha": 3.0}


class OtherResults(OwnLogs):
    """A log is the result of another metric if the batches have no targets."""

    def train_step(self, data: Any) -> dict[str, Any]:
        logs = self.test_step(data)
        return logs if len(data) == 2 else {**logs, "alpha": logs["zeta"]}


class OtherTexts(OwnLogs):
    """A log is another text if the batches have no targets."""

    def train_step(self, data: Any) -> dict[str, Any]:
        texts = ["both", "two"] if len(data) == 2 else ["inputs", "one"]
        return {**self.test_step(data), "text": texts[0], "texts": tf.constant(texts)}


@pytest.mark.parametrize("make", [OtherLogs, OtherKinds, OtherResults, OtherTexts])
def test_logs_belong_to_the_structure_of_the_data(make: Any) -> None:
    """The last `fit` is traced anew, for a dataset, and calls the step of the first trace."""

    def logs_of(model: keras.Model) -> str:
        inputs = tf.data.Dataset.from_tensors((X,))
        both = tf.data.Dataset.from_tensors((X, Y))
        histories = [
            model.fit(X, Y, verbose=0).history,
            model.fit(inputs, verbose=0).history,
            model.fit(both, verbose=0).history,
        ]
        return str(histories)

    plain, prepared = (logs_of(model) for model in plain_and_prepared(make))
    assert prepared == plain


def test_one_result_is_a_number() -> None:
    with make_strategy("one_device").scope():
        model = prepare(of_keras())
        model.compile("sgd", "mse")
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(9.0)


def test_a_metric_of_several_numbers_is_an_array() -> None:
    found = []
    for model in plain_and_prepared(of_keras, metrics=[keras.metrics.F1Score()]):
        history = model.fit(X, Y, verbose=0).history["f1_score"]
        results = [*history, *model.evaluate(X, Y, verbose=0), *model.train_on_batch(X, Y)]
        found.append([(type(value), np.shape(value)) for value in results])
    assert found[0] == found[1]
    assert (np.ndarray, (1,)) in found[0]

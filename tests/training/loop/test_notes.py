"""Tests of what `fit` tells where plain Keras takes other data, steps or random numbers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmulti import make_strategy, prepare
from tfmulti.data.arrays import ArraySource

X = np.arange(32.0, dtype=np.float32)[:, None] / 32.0
ENDLESS = tf.data.Dataset.from_tensor_slices((X, X)).batch(8).repeat()


def compiled(*, by_tfmulti: bool = True, rate: float | None = None, **options: Any) -> keras.Model:
    scope = make_strategy("one_device").scope() if by_tfmulti else contextlib.nullcontext()
    with scope:
        dropout = [] if rate is None else [keras.layers.Dropout(rate)]
        model = keras.Sequential([keras.Input((1,)), *dropout, keras.layers.Dense(1)])
        if by_tfmulti:
            prepare(model)
        model.compile("sgd", "mse", **options)
    return model


def test_fit_says_that_a_pydataset_has_another_order(capsys: pytest.CaptureFixture[str]) -> None:
    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return X[index * 8 : index * 8 + 8], X[index * 8 : index * 8 + 8]

    model = compiled()
    model.fit(Batches(), epochs=1, verbose=2, shuffle=False)
    assert "PyDataset" not in capsys.readouterr().out
    model.fit(Batches(), epochs=1, verbose=2)
    model.fit(Batches(), epochs=1, verbose=2)
    assert capsys.readouterr().out.count("the PyDataset's batches have an order of tfmulti") == 1


class Numbers(keras.callbacks.Callback):
    """Notes the numbers of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.numbers.append(batch)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.numbers.append(batch)


@pytest.mark.parametrize(("at_once", "told"), [(2, 0), (3, 1)])
def test_callbacks_that_get_other_numbers_are_named(
    at_once: int, told: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The four batches of an epoch take two executions of three steps."""
    model = compiled(steps_per_execution=at_once)
    progress = keras.callbacks.ProgbarLogger()
    model.fit(X, X, batch_size=8, verbose=2, callbacks=[progress])
    assert "gets the number" not in capsys.readouterr().out
    numbers = Numbers()
    for _ in range(2):
        model.fit(X, X, batch_size=8, verbose=2, callbacks=[numbers])
    text = "Numbers gets the number of the last batch"
    assert capsys.readouterr().out.count(text) == told
    assert numbers.numbers == ([1, 3] if at_once == 2 else [2, 3]) * 2
    model.evaluate(X, X, batch_size=8, verbose=2, callbacks=[numbers])
    assert text not in capsys.readouterr().out
    model.predict(X, batch_size=8, verbose=2, callbacks=[numbers])
    assert text in capsys.readouterr().out


def test_plain_keras_still_counts_whole_executions() -> None:
    numbers = Numbers()
    model = compiled(by_tfmulti=False, steps_per_execution=3)
    model.fit(X, X, batch_size=8, verbose=0, callbacks=[numbers])
    model.predict(X, batch_size=8, verbose=0, callbacks=[numbers])
    assert numbers.numbers == [2, 5] * 2


def batches() -> Iterator[Any]:
    for start in range(0, 32, 8):
        yield X[start : start + 8], X[start : start + 8]


def test_fit_says_that_plain_keras_counts_the_end_of_data(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = compiled()
    model.fit(batches(), verbose=2, steps_per_epoch=4)
    model.predict(batches(), verbose=2)
    assert "plain Keras" not in capsys.readouterr().out
    steps_before = int(model.optimizer.iterations)
    model.fit(batches(), verbose=2)
    model.evaluate(batches(), verbose=2)
    assert capsys.readouterr().out.count("plain Keras takes one step more at its end") == 1
    assert int(model.optimizer.iterations) - steps_before == 4


def test_plain_keras_counts_the_end_of_data() -> None:
    """If it no longer does so, the line that `fit` prints can go."""
    model = compiled(by_tfmulti=False)
    model.fit(batches(), verbose=0)
    assert int(model.optimizer.iterations) == 5


def test_an_execution_of_several_steps_has_no_step_at_the_end_of_data(
    capsys: pytest.CaptureFixture[str],
) -> None:
    compiled(steps_per_execution=2).fit(batches(), verbose=2)
    assert "plain Keras" not in capsys.readouterr().out


def test_fit_says_that_plain_keras_takes_whole_executions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given: dict[str, Any] = {"validation_data": ENDLESS, "validation_steps": 1}
    model = compiled(steps_per_execution=2)
    model.fit(ENDLESS, steps_per_epoch=3, verbose=2, **given)
    assert int(model.optimizer.iterations) == 3
    model.evaluate(ENDLESS, steps=3, verbose=2)
    told = capsys.readouterr().out
    for argument, steps, more in (
        ("steps_per_epoch", 3, 4),
        ("validation_steps", 1, 2),
        ("steps", 3, 4),
    ):
        assert f" {argument}={steps} is no multiple of steps_per_execution=2" in told
        assert f"{steps} steps are taken, where plain Keras takes {more}" in told
    plain = compiled(by_tfmulti=False, steps_per_execution=2)
    plain.fit(ENDLESS, steps_per_epoch=3, verbose=0)
    assert int(plain.optimizer.iterations) == 4


def test_fit_says_that_plain_keras_ends_an_epoch_where_arrays_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = compiled()
    model.fit(X, X, batch_size=8, steps_per_epoch=3, epochs=2, verbose=2)
    assert int(model.optimizer.iterations) == 6
    told = "does not divide the 4 batches of the arrays"
    assert capsys.readouterr().out.count(told) == 1
    compiled().fit(ArraySource((X, X)), batch_size=8, steps_per_epoch=3, epochs=2, verbose=2)
    assert told not in capsys.readouterr().out
    plain = compiled(by_tfmulti=False)
    plain.fit(X, X, batch_size=8, steps_per_epoch=3, epochs=2, verbose=0)
    assert int(plain.optimizer.iterations) == 4


def test_steps_that_plain_keras_takes_too_are_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    model = compiled(steps_per_execution=3)
    model.fit(X, X, batch_size=8, verbose=2)
    model.fit(X, X, batch_size=8, steps_per_epoch=4, verbose=2)
    compiled().fit(X, X, batch_size=8, steps_per_epoch=2, epochs=3, verbose=2)
    compiled().fit(X, X, batch_size=8, steps_per_epoch=3, verbose=2)
    model.fit(ENDLESS, steps_per_epoch=3, verbose=2)
    assert "plain Keras" not in capsys.readouterr().out


def test_fit_without_output_warns_of_a_difference() -> None:
    model = compiled()
    with pytest.warns(UserWarning, match="steps: .* plain Keras takes one step more") as caught:
        model.fit(batches(), verbose=0)
    # The warning names the line of the user's program.
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(batches(), verbose=0)
        model.evaluate(batches(), verbose=0)


def test_fit_says_that_xla_of_plain_keras_draws_other_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for rate, count in ((0.5, 1), (None, 0)):
        model = compiled(rate=rate, jit_compile=True)
        model.fit(X, X, verbose=2)
        model.fit(X, X, verbose=2)
        told = capsys.readouterr().out
        assert told.count("XLA, its default on GPUs, draws other ones") == count
    compiled(rate=0.5, jit_compile=False).fit(X, X, verbose=2)
    assert "XLA" not in capsys.readouterr().out


class Rows(keras.metrics.Metric):
    """Counts rows, and returns the variable of the count, or a tensor."""

    def __init__(self, returns: str) -> None:
        super().__init__(name="rows")
        self.returns, self.count = returns, self.add_variable((), "zeros", name="count")

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(keras.ops.cast(keras.ops.shape(y)[0], "float32"))

    def result(self) -> Any:
        found: dict[str, Callable[[], Any]] = {
            "variable": lambda: self.count,
            "value": lambda: self.count.value,
            "in a dict": lambda: {"rows": self.count},
            "tensor": lambda: self.count + 0,
        }
        return found[self.returns]()


@pytest.mark.parametrize("returns", ["variable", "value", "in a dict", "tensor"])
def test_fit_warns_of_a_log_that_plain_keras_reads_after_the_validation(returns: str) -> None:
    def logged(*, by_tfmulti: bool) -> Any:
        model = compiled(by_tfmulti=by_tfmulti, metrics=[Rows(returns)])
        data = {"x": X, "y": X, "batch_size": 8, "verbose": 0}
        model.fit(**data)
        return model.fit(**data, epochs=2, validation_data=(X[:5], X[:5])).history["rows"]

    assert logged(by_tfmulti=False) == ([32, 32] if returns == "tensor" else [5, 5])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert logged(by_tfmulti=True) == [32, 32]
    told = [
        w for w in caught if "the result of the metric 'rows' is its variable" in str(w.message)
    ]
    assert len(told) == (returns != "tensor")


@pytest.mark.parametrize("thresholds", [[0.3], [0.3, 0.5]])
def test_fit_warns_of_counts_that_plain_keras_reads_after_the_validation(
    thresholds: list[float],
) -> None:
    def logged(*, by_tfmulti: bool) -> Any:
        counts = keras.metrics.FalseNegatives(thresholds=thresholds, name="counts")
        model = compiled(by_tfmulti=by_tfmulti, metrics=[counts])
        model.set_weights([np.zeros((1, 1)), np.zeros(1)])
        model.optimizer.learning_rate = 0.0
        ones = np.ones_like(X)
        data = {"batch_size": 8, "verbose": 0, "validation_data": (X[:5], ones[:5])}
        return np.ravel(model.fit(X, ones, **data).history["counts"]).tolist()

    assert logged(by_tfmulti=False) == ([32] if len(thresholds) == 1 else [5, 5])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert logged(by_tfmulti=True) == [32] * len(thresholds)
    told = [w for w in caught if "the metric 'counts' is its variable" in str(w.message)]
    assert len(told) == len(thresholds) - 1


def test_fit_says_that_steps_per_execution_has_changed() -> None:
    def taken(*, by_tfmulti: bool) -> int:
        model = compiled(by_tfmulti=by_tfmulti)
        model.fit(X, X, batch_size=4, verbose=0)
        model.steps_per_execution = 2
        model.fit(X, X, batch_size=4, verbose=0)
        return int(model.optimizer.iterations) - 8

    assert taken(by_tfmulti=False) == 4
    with pytest.warns(UserWarning, match="was 1 in an earlier fit and is 2; plain Keras keeps"):
        assert taken(by_tfmulti=True) == 8


def test_fit_does_not_warn_of_the_metrics_of_an_earlier_fit() -> None:
    model = compiled(metrics=["mae"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            model.fit(X, X, batch_size=8, verbose=0)
            model.train_function = None


@pytest.mark.parametrize("is_new", [False, True])
def test_fit_warns_of_a_metric_that_has_counted_rows_before_compile(is_new: bool) -> None:
    def logged(*, by_tfmulti: bool) -> float:
        keras.utils.set_random_seed(1)
        metric = keras.metrics.MeanSquaredError(name="error")
        model = compiled(by_tfmulti=by_tfmulti, metrics=[metric])
        data = {"x": X, "y": X, "batch_size": 8, "verbose": 0}
        model.fit(**data)
        metric = keras.metrics.MeanSquaredError(name="error") if is_new else metric
        model.compile("sgd", "mse", metrics=[metric])
        return float(model.fit(**data).history["error"][0])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log = logged(by_tfmulti=True)
    told = [w for w in caught if "'error' has counted rows before this compile" in str(w.message)]
    assert len(told) == (not is_new)
    assert (log == pytest.approx(logged(by_tfmulti=False), rel=1e-6)) == is_new

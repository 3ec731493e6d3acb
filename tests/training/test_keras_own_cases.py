"""Tests the cases of Keras' own tests of distribution, with numbers computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.behaviours import behaviour, keras_own_cases
from tests.support.places import EVERYWHERE, ONE_DEVICE, TWO_REPLICAS, few

pytestmark = pytest.mark.multiworker


def on_all(expected: Any, values: Any) -> bool:
    """Returns whether all local replicas hold the expected value."""
    return all(value == pytest.approx(expected, abs=1e-6) for value in values)


@behaviour(keras_own_cases.single_step, at=EVERYWHERE)
def test_single_step(results: list[Any]) -> None:
    """The weights lose 0.5 × (1, 6, 7, 2)."""
    for ((weights,),) in results:
        assert on_all([0.5, -1.0, -0.5, 3.0], weights)


@behaviour(keras_own_cases.config, at=few(TWO_REPLICAS, of=EVERYWHERE))
def test_config(results: list[Any]) -> None:
    assert all(worker == [True, True] for worker in results)


@behaviour(keras_own_cases.weight_decay, at=few(TWO_REPLICAS, of=EVERYWHERE))
def test_weight_decay(results: list[Any]) -> None:
    """The last weight is excluded by its name."""
    for ((first, second),), ((third, fourth),) in results:
        assert on_all([2 * 0.996], first)
        assert on_all([3 * 0.996], second)
        assert on_all([2 * 0.996], third)
        assert on_all([3.0], fourth)


@behaviour(keras_own_cases.nesterov, at=few(TWO_REPLICAS, of=EVERYWHERE))
def test_nesterov(results: list[Any]) -> None:
    """SGD(0.01) without momentum is plain: 1 - 0.01 × gradient, then 0.0001 a step."""
    for worker in results:
        assert len(worker) == 5
        for step, replicas in enumerate(worker):
            assert on_all(1 - 0.001 * np.arange(1, 11) - 0.0001 * step, replicas)


@pytest.mark.parametrize("place", few(TWO_REPLICAS, of=EVERYWHERE))
@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        (keras_own_cases.clip_norm, [-(2**0.5) / 2] * 2),
        (keras_own_cases.clip_value, [-1.0, -1.0]),
    ],
)
def test_clipping(results: list[Any], expected: list[float]) -> None:
    """The gradient of the global batch is (100, 100), unlike that of any replica."""
    for ((weights,),) in results:
        assert on_all(expected, weights)


@behaviour(keras_own_cases.stateless_apply, at=few(TWO_REPLICAS, of=EVERYWHERE))
def test_stateless_apply_is_refused(errors: list[list[str]]) -> None:
    for error, message in errors:
        assert error == "ValueError"
        assert "not supported" in message


@behaviour(keras_own_cases.moving_average, at=few(TWO_REPLICAS, of=EVERYWHERE))
def test_moving_average(results: list[Any]) -> None:
    """The average is 2, then 0.9 × 2 + 0.1 × 1 = 1.9, then 0.9 × 1.9 + 0.1 × 0 = 1.71.

    After the third step it overwrites the weights.
    """
    for (first,), (second,), (third,) in results:
        assert on_all([2.0, 3.0], first)
        assert on_all([1.0, 2.0], second)
        assert on_all([1.71, 2.71], third)


@behaviour(keras_own_cases.gradient_accumulation, at=few(TWO_REPLICAS, of=EVERYWHERE))
def test_gradient_accumulation(results: list[Any]) -> None:
    """The third step subtracts the mean of three gradients (1, 2)."""
    for ((first,), (second,), (third,)), iterations in results:
        assert on_all([1.0, 2.0], first)
        assert on_all([1.0, 2.0], second)
        assert on_all([0.0, 0.0], third)
        assert iterations == 1


@behaviour(keras_own_cases.variables_are_mirrored, at=EVERYWHERE)
def test_variables_are_mirrored(results: list[Any], place: str) -> None:
    for worker in results:
        assert worker == [["Variable", place != ONE_DEVICE, "none"]] * 2


@behaviour(keras_own_cases.aggregation_and_synchronization, at=few(TWO_REPLICAS, of=EVERYWHERE))
def test_aggregation_and_synchronization(results: list[Any], place: str) -> None:
    for kernel, total, aggregation_in_keras in results:
        assert kernel[0] == "VariableAggregationV2.NONE"
        assert total == ["VariableAggregationV2.SUM", "VariableSynchronization.ON_READ"]
        assert aggregation_in_keras == ["none", "sum"]
        if place != ONE_DEVICE:
            assert kernel[1] == "VariableSynchronization.ON_WRITE"


@behaviour(keras_own_cases.run_of_a_model, at=EVERYWHERE)
def test_run_of_a_model(results: list[Any], place: str) -> None:
    replicas = [replica for worker in results for replica in worker]
    assert replicas[0] == [[0.0, 0.0]] * 8
    assert replicas[1:] == ([] if place == ONE_DEVICE else [[[4.0, 4.0]] * 8])


@behaviour(keras_own_cases.epochs_of_batches, at=EVERYWHERE)
def test_epochs_of_batches(results: list[Any]) -> None:
    for steps, rows in results:
        assert steps == [0, 1, 2, 3, 4, 5, 6]
        assert rows == [16, 32, 48, 64, 80, 96, 100]


@behaviour(keras_own_cases.seed_generator, at=EVERYWHERE)
def test_seed_generator(results: list[Any]) -> None:
    """The generator of seed 42 has one draw a step, the same on all replicas."""
    for worker in results:
        assert all(state == [42, 4] for state in worker)


@behaviour(keras_own_cases.regularized_fit, at=few(TWO_REPLICAS, of=EVERYWHERE))
def test_regularized_fit(results: list[Any]) -> None:
    """The loss is 1 + 0.01 + 0.01, and the weight 1 - 0.01 × (2 + 0.01 + 0.02)."""
    for (loss,), weights in results:
        assert loss == pytest.approx(1.02, abs=1e-6)
        assert on_all([1 - 0.01 * 2.03], [row for replica in weights for row in replica])

"""The cases of Keras' own tests of distribution, with numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.multiworker

KINDS = pytest.mark.parametrize("kind", ["one_device", "mirrored", "multi_worker_mirrored"])
Behaviours = Callable[..., list[dict[str, Any]]]


def found(behaviours: Behaviours, kind: str, name: str) -> list[Any]:
    """Returns what a behaviour left, an entry a worker."""
    workers = behaviours(kind) if kind == "one_device" else behaviours(kind, 2)
    return [worker[f"keras_{name}"] for worker in workers]


def on_all(expected: Any, values: Any) -> bool:
    """Whether all local replicas hold the expected value."""
    return all(value == pytest.approx(expected, abs=1e-6) for value in values)


@KINDS
def test_single_step(behaviours: Behaviours, kind: str) -> None:
    for ((weights,),) in found(behaviours, kind, "single_step"):
        assert on_all([0.5, -1.0, -0.5, 3.0], weights)  # less 0.5 × (1, 6, 7, 2)


@KINDS
def test_config(behaviours: Behaviours, kind: str) -> None:
    assert all(worker == [True, True] for worker in found(behaviours, kind, "config"))


@KINDS
def test_weight_decay(behaviours: Behaviours, kind: str) -> None:
    for ((first, second),), ((third, fourth),) in found(behaviours, kind, "weight_decay"):
        assert on_all([2 * 0.996], first)
        assert on_all([3 * 0.996], second)
        assert on_all([2 * 0.996], third)
        assert on_all([3.0], fourth)  # left out by its name


@KINDS
def test_nesterov(behaviours: Behaviours, kind: str) -> None:
    """SGD(0.01) without momentum is plain: 1 - 0.01 × gradient, then 0.0001 a step."""
    for worker in found(behaviours, kind, "nesterov"):
        assert len(worker) == 5
        for step, replicas in enumerate(worker):
            assert on_all(1 - 0.001 * np.arange(1, 11) - 0.0001 * step, replicas)


@KINDS
def test_clipping(behaviours: Behaviours, kind: str) -> None:
    """The gradient of the global batch is (100, 100); no replica's own is."""
    for ((weights,),) in found(behaviours, kind, "clip_norm"):
        assert on_all([-(2**0.5) / 2] * 2, weights)
    for ((weights,),) in found(behaviours, kind, "clip_value"):
        assert on_all([-1.0, -1.0], weights)


@KINDS
def test_stateless_apply_is_refused(behaviours: Behaviours, kind: str) -> None:
    for worker in found(behaviours, kind, "stateless_apply"):
        assert worker["error"][0] == "ValueError"
        assert "not supported" in worker["error"][1]


@KINDS
def test_moving_average(behaviours: Behaviours, kind: str) -> None:
    """The average is 2, then 0.9 × 2 + 0.1 × 1 = 1.9, then 0.9 × 1.9 + 0.1 × 0 = 1.71."""
    for (first,), (second,), (third,) in found(behaviours, kind, "moving_average"):
        assert on_all([2.0, 3.0], first)
        assert on_all([1.0, 2.0], second)
        assert on_all([1.71, 2.71], third)  # overwritten


@KINDS
def test_gradient_accumulation(behaviours: Behaviours, kind: str) -> None:
    for ((first,), (second,), (third,)), iterations in found(
        behaviours, kind, "gradient_accumulation"
    ):
        assert on_all([1.0, 2.0], first)
        assert on_all([1.0, 2.0], second)
        assert on_all([0.0, 0.0], third)  # less the mean of three gradients (1, 2)
        assert iterations == 1


@KINDS
def test_variables_are_mirrored(behaviours: Behaviours, kind: str) -> None:
    for worker in found(behaviours, kind, "variables_are_mirrored"):
        assert worker == [["Variable", kind != "one_device", "none"]] * 2


@KINDS
def test_aggregation_and_synchronization(behaviours: Behaviours, kind: str) -> None:
    for kernel, total, keras_words in found(behaviours, kind, "aggregation_and_synchronization"):
        assert kernel[0] == "VariableAggregationV2.NONE"
        assert total == ["VariableAggregationV2.SUM", "VariableSynchronization.ON_READ"]
        assert keras_words == ["none", "sum"]
        if kind != "one_device":
            assert kernel[1] == "VariableSynchronization.ON_WRITE"


@KINDS
def test_run_of_a_model(behaviours: Behaviours, kind: str) -> None:
    workers = found(behaviours, kind, "run_of_a_model")
    replicas = [replica for worker in workers for replica in worker]
    assert replicas[0] == [[0.0, 0.0]] * 8
    assert replicas[1:] == ([] if kind == "one_device" else [[[4.0, 4.0]] * 8])


@KINDS
def test_epochs_of_batches(behaviours: Behaviours, kind: str) -> None:
    for steps, rows in found(behaviours, kind, "epochs_of_batches"):
        assert steps == [0, 1, 2, 3, 4, 5, 6]
        assert rows == [16, 32, 48, 64, 80, 96, 100]


@KINDS
def test_seed_generator(behaviours: Behaviours, kind: str) -> None:
    for worker in found(behaviours, kind, "seed_generator"):
        assert all(state == [42, 4] for state in worker)  # one draw a step, the same for all


@KINDS
def test_regularized_fit(behaviours: Behaviours, kind: str) -> None:
    """Loss 1 + 0.01 + 0.01; weight 1 - 0.01 × (2 + 0.01 + 0.02)."""
    for (loss,), weights in found(behaviours, kind, "regularized_fit"):
        assert loss == pytest.approx(1.02, abs=1e-6)
        assert on_all([1 - 0.01 * 2.03], [row for replica in weights for row in replica])

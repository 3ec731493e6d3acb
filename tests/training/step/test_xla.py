"""Tests that XLA compiles the computing of a replica, and no communication."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.behaviours import behaviour, xla
from tests.support.places import EVERYWHERE, ONE_DEVICE, TWO_REPLICAS, TWO_WORKERS, few

pytestmark = pytest.mark.multiworker

# Why XLA cannot compile a network. The second reason holds only for several replicas.
OBSTACLES = {
    "dense": None,
    "normalized": "takes the statistics of all replicas",
    "dropped": "draws random numbers",
}


@behaviour(xla.passes_compiled_by_xla, at=few(ONE_DEVICE, TWO_WORKERS, of=EVERYWHERE))
@pytest.mark.parametrize("network", OBSTACLES)
def test_xla_does_not_change_the_numbers(results: list[Any], place: str, network: str) -> None:
    for worker in results:
        plain, by_xla = worker[network]
        local_replicas = 2 if place == TWO_REPLICAS else 1
        obstacle = OBSTACLES[network]
        if place == ONE_DEVICE and network == "normalized":
            obstacle = None
        assert plain["functions"] == 0
        assert plain["warned"] == []
        for one, other in zip(plain["weights"], by_xla["weights"], strict=True):
            np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)
        for key, values in plain["logs"].items():
            np.testing.assert_allclose(by_xla["logs"][key], values, rtol=1e-6)
        assert by_xla["collectives"] == plain["collectives"]
        if obstacle:
            assert by_xla["functions"] == 0
            assert all(obstacle in text for text in by_xla["warned"])
            assert by_xla["warned"]
        else:
            assert by_xla["warned"] == []
            assert by_xla["functions"] == local_replicas
            # The forward pass has two products. The backward pass has two for each layer, less
            # the one for the inputs.
            assert by_xla["products"] == local_replicas * (2 + 3)
            assert (by_xla["collectives inside"], by_xla["updates"]) == (0, 0)


@behaviour(xla.jit_compile_options, at=few(TWO_REPLICAS, of=EVERYWHERE))
def test_the_jit_compile_of_prepare_wins_over_that_of_compile(
    results: list[Any], place: str
) -> None:
    assert all(worker == [2 if place == TWO_REPLICAS else 1, 0, 0] for worker in results)


@behaviour(xla.warnings_of_steps_without_xla, at=few(TWO_REPLICAS, of=EVERYWHERE))
def test_a_warning_says_why_xla_does_not_compile(results: list[Any]) -> None:
    reasons = ["a train_step of your own", "--microbatches", "a layer does not support it"]
    for worker in results:
        for warnings, reason in zip(worker, reasons, strict=True):
            assert len(warnings) == 1
            assert reason in warnings[0]

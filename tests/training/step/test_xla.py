"""XLA compiles what a replica computes by itself; what replicas tell each other stays outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.training.step.test_costs import KINDS, workers_of

pytestmark = pytest.mark.multiworker

Behaviours = Callable[..., list[dict[str, Any]]]

HINDRANCES = {  # on several replicas; random numbers, on one device too
    "dense": None,
    "normalized": "takes the statistics of all replicas",
    "dropped": "draws random numbers",
}


@KINDS
@pytest.mark.parametrize("name", HINDRANCES)
def test_passes_by_xla_leave_the_same_numbers(behaviours: Behaviours, kind: str, name: str) -> None:
    for worker in workers_of(behaviours, kind):
        plain, by_xla = worker["passes_by_xla"][name]
        local = 2 if kind == "mirrored" else 1
        alone = kind == "one_device" and name == "normalized"
        hindrance = None if alone else HINDRANCES[name]
        assert plain["functions"] == 0
        assert plain["warned"] == []
        for one, other in zip(plain["weights"], by_xla["weights"], strict=True):
            np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)
        for key, values in plain["logs"].items():
            np.testing.assert_allclose(by_xla["logs"][key], values, rtol=1e-6)
        assert by_xla["collectives"] == plain["collectives"]
        if hindrance:
            assert by_xla["functions"] == 0
            assert all(hindrance in text for text in by_xla["warned"])
            assert by_xla["warned"]
        else:
            assert by_xla["warned"] == []
            assert by_xla["functions"] == local
            # Forward, and backward of both layers but for the inputs.
            assert by_xla["products"] == local * (2 + 3)
            assert (by_xla["collectives inside"], by_xla["updates"]) == (0, 0)


@KINDS
def test_compile_may_ask_for_xla_and_prepare_decides(behaviours: Behaviours, kind: str) -> None:
    for worker in workers_of(behaviours, kind):
        assert worker["who_asks_for_xla"] == [2 if kind == "mirrored" else 1, 0, 0]


@KINDS
def test_what_is_not_compiled_is_said(behaviours: Behaviours, kind: str) -> None:
    reasons = ["a train_step of your own", "--microbatches", "a layer does not support it"]
    for worker in workers_of(behaviours, kind):
        for warned, reason in zip(worker["steps_that_xla_leaves"], reasons, strict=True):
            assert len(warned) == 1
            assert reason in warned[0]

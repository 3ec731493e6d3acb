"""What a step costs, in counts: no test measures time."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tfmulti.distribution.collectives import SEND
from tfmulti.training.step.steps_per_execution import TRIALS

pytestmark = pytest.mark.multiworker

KINDS = pytest.mark.parametrize("kind", ["one_device", "mirrored", "multi_worker_mirrored"])
Behaviours = Callable[..., list[dict[str, Any]]]
STEPS = 40  # of the behaviour that chooses its pace


def workers_of(behaviours: Behaviours, kind: str) -> list[dict[str, Any]]:
    return behaviours(kind) if kind == "one_device" else behaviours(kind, 2)


def test_a_step_has_one_collective_beside_its_gradients(behaviours: Behaviours) -> None:
    """It has metrics, votes and digest. A BatchNormalization has one forward and one backward."""
    for worker in behaviours("multi_worker_mirrored", 2):
        found = worker["collectives_of_a_step"]
        assert found["dense"] == [SEND] * 2
        assert found["normalized"] == [SEND] * (2 + 2 * 2)
        # 700 * 800 values by themselves; the others are less than a pack
        assert found["large"] == [SEND] * 3
    alone = behaviours("one_device")[0]["collectives_of_a_step"]
    assert set(map(tuple, alone.values())) == {()}


def test_gradients_that_are_there_are_computed_before_a_wait(behaviours: Behaviours) -> None:
    """Of two BatchNormalizations, with a Dense between them and one behind."""
    for worker in behaviours("multi_worker_mirrored", 2):
        found = [types for types in worker["computed_before_waits"] if types]
        assert len(found) == 2  # backward; forward and for gradients nothing is left to compute
        assert all({"MatMul", "BiasAddGrad"} <= set(types) for types in found)


def test_replicas_of_one_process_need_no_collective(behaviours: Behaviours) -> None:
    """On CPUs; where TensorFlow's serve, as on GPUs, they are as few, and the numbers the same."""
    plain, by_collectives = behaviours("mirrored", 2)[0]["by_tensorflows_collectives"]
    for name, packs in {"dense": 1, "normalized": 1 + 2 * 2, "large": 1}.items():
        (none, weights), (kinds, same) = plain[name], by_collectives[name]
        assert none == []
        assert kinds == ["CollectiveReduceV2"] * 2 * (packs + 1)  # within a process packs are whole
        for one, other in zip(weights, same, strict=True):
            np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)


@KINDS
def test_a_step_of_the_users_own_is_traced_once_to_build_its_parts(
    behaviours: Behaviours, kind: str
) -> None:
    """And on each replica of the process to train; never again, whatever optimizers are unused."""
    replicas = 2 if kind == "mirrored" else 1
    for worker in workers_of(behaviours, kind):
        assert worker["traces_of_an_own_step"] == [1 + replicas, 0]


@KINDS
def test_workers_of_one_machine_share_its_cores(behaviours: Behaviours, kind: str) -> None:
    """TensorFlow's own number (0) is as many threads as cores, on each worker."""
    shared = kind == "multi_worker_mirrored" and len(os.sched_getaffinity(0)) == os.cpu_count()
    threads = max(1, (os.cpu_count() or 1) // 2) if shared else 0
    for worker in workers_of(behaviours, kind):
        assert worker["threads_that_compute"] == threads


def test_workers_that_cannot_connect_train_by_tensorflows_collectives(
    behaviours: Behaviours,
) -> None:
    """All of them, where one cannot reach another; to the same numbers."""
    workers = behaviours("multi_worker_mirrored", 2)
    for worker in workers:
        (own, weights), (tensorflows, same) = worker["without_connections"]
        assert own == [SEND]
        assert all(kind.startswith("Collective") for kind in tensorflows)
        assert tensorflows
        for one, other in zip(weights, same, strict=True):
            np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)
    assert workers[0]["without_connections"] == workers[1]["without_connections"]


@pytest.mark.parametrize(
    ("kind", "kernels"), [("one_device", 0), ("mirrored", 2 * 4), ("multi_worker_mirrored", 4)]
)
def test_sgd_updates_by_a_kernel(behaviours: Behaviours, kind: str, kernels: int) -> None:
    """Each of the four variables, on each local replica; one device has Keras' bits."""
    for worker in workers_of(behaviours, kind):
        assert worker["kernels_that_update"] == kernels


@KINDS
def test_a_step_is_one_call_and_traced_once(behaviours: Behaviours, kind: str) -> None:
    """Of a batch with fewer rows, too: any number of them is one trace."""
    for worker in workers_of(behaviours, kind):
        calls, reads, traces = worker["calls_of_a_step"]
        assert calls == 20
        # Votes and rows; on several workers the data's digest, too, and what could not be read.
        assert reads == 20 * (4 if kind == "multi_worker_mirrored" else 2)
        assert traces == 1


@KINDS
def test_autograph_reads_no_function_of_ours(behaviours: Behaviours, kind: str) -> None:
    """Which takes it a second at the start of each run: only a step of the user's own."""
    for worker in workers_of(behaviours, kind):
        of_keras, of_the_user = worker["read_by_autograph"]
        assert of_keras == []
        assert of_the_user == ["tf__train_step"]


@KINDS
def test_fit_leaves_no_thread(behaviours: Behaviours, kind: str) -> None:
    for worker in workers_of(behaviours, kind):
        assert worker["threads_after_fit"] == []


@KINDS
def test_all_take_the_chiefs_pace(behaviours: Behaviours, kind: str) -> None:
    """After the trials the chief's wish travels with one step, or is followed at once.

    Steps that gather rows are one call each on several replicas, and stay so.
    """
    for worker in workers_of(behaviours, kind):
        (single, exact), (chosen, weights), (gathering, _) = worker["the_chiefs_pace"]
        assert gathering == (chosen if kind == "one_device" else single)
        assert single == list(range(STEPS))
        alone = TRIALS + 3
        assert chosen == [*range(alone), *range(alone + 6, STEPS - 1, 7), STEPS - 1]
        assert weights == exact

"""Tests the costs of a step by counts of operations. No test here measures time."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from tests.support.behaviours import behaviour, costs
from tests.support.places import EVERYWHERE, ONE_DEVICE, SEVERAL, TWO_REPLICAS, TWO_WORKERS, few
from tfmulti.distribution.collectives import SEND
from tfmulti.training.step.steps_per_execution import TRIALS

pytestmark = pytest.mark.multiworker

STEPS_OF_AUTOMATIC_RUN = 40


@behaviour(costs.collectives_of_a_step, at=[TWO_WORKERS])
def test_a_step_has_one_collective_besides_its_gradients(
    results: list[Any], one_device: dict[str, Any]
) -> None:
    """This collective sums metrics, votes and the digest of the batch.

    Gradients are sent in buckets of 0.5 MB, a larger gradient by itself: here 700 * 800 values.
    A BatchNormalization has one collective forward and one backward.
    """
    for worker in results:
        assert worker["dense"] == [SEND] * 2
        assert worker["normalized"] == [SEND] * (2 + 2 * 2)
        assert worker["large"] == [SEND] * 3
    assert set(map(tuple, one_device.values())) == {()}


@behaviour(costs.operations_before_each_wait, at=[TWO_WORKERS])
def test_gradients_are_computed_before_a_wait_that_they_do_not_need(results: list[Any]) -> None:
    """The model has two BatchNormalizations, with a Dense between them and a Dense at the end.

    Only a wait in the backward pass can be preceded by gradients that do not need it. In the
    forward pass, and before the wait for the gradients, nothing is left to compute.
    """
    for worker in results:
        waits = [types for types in worker if types]
        assert len(waits) == 2
        assert all({"MatMul", "BiasAddGrad"} <= set(types) for types in waits)


@behaviour(costs.operations_before_the_collectives_of_an_execution, at=[TWO_WORKERS])
def test_workers_begin_the_collectives_of_an_execution_after_those_of_its_step(
    results: list[Any],
) -> None:
    """The order would vary otherwise. Workers with different orders would wait for each other."""
    for before, waiting in results:
        assert "StatefulPartitionedCall" in before
        assert waiting.count("Identity") > 1


@behaviour(costs.replicas_with_and_without_collectives, at=[TWO_REPLICAS])
def test_replicas_of_one_process_need_no_collective(results: list[Any]) -> None:
    """This holds on CPUs. With TensorFlow's collectives, as on GPUs, the numbers are the same.

    Within a process a large gradient needs no collective of its own.
    """
    [(plain, by_collectives)] = results
    for name, buckets in {"dense": 1, "normalized": 1 + 2 * 2, "large": 1}.items():
        (none, weights), (kinds, same) = plain[name], by_collectives[name]
        assert none == []
        assert kinds == ["CollectiveReduceV2"] * 2 * (buckets + 1)
        for one, other in zip(weights, same, strict=True):
            np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)


@behaviour(costs.traces_of_a_custom_step, at=few(ONE_DEVICE, TWO_REPLICAS, of=EVERYWHERE))
@pytest.mark.parametrize(("case", "to_build"), [("built", 0), ("not built", 1)])
def test_a_custom_step_is_traced_once_per_replica_and_once_to_build_layers(
    results: list[Any], place: str, to_build: int
) -> None:
    """Its optimizer is built meanwhile. A second fit traces nothing.

    The optimizer of `compile` is unused.
    """
    replicas = 2 if place == TWO_REPLICAS else 1
    assert all(worker == [to_build + replicas, 0] for worker in results)


@behaviour(costs.work_of_a_trace, at=[TWO_REPLICAS])
def test_a_trace_does_not_repeat_its_work(results: list[Any]) -> None:
    """A metric's result is computed to build the model, in each replica's step, and for the logs.

    Variables are told apart without a search of all that a graph captures.
    """
    [((calls, listed), (calls_of_more, listed_of_more))] = results
    assert calls == calls_of_more == 1 + 2 + 1
    assert listed == listed_of_more


@behaviour(costs.operations_built_again, at=[TWO_REPLICAS])
def test_a_metric_of_mixed_rows_is_traced_once(results: list[Any]) -> None:
    """The largest value and the division by it are computed anew, and not the whole metric."""
    [operations] = results
    assert operations == {"Max": 2, "RealDiv": 2}


@behaviour(costs.evaluation_of_mixed_rows, at=[TWO_REPLICAS])
def test_a_metric_of_mixed_rows_needs_no_whole_batches(results: list[Any]) -> None:
    """How its rows depend on the batch is known."""
    assert results == [[]]


@behaviour(costs.inter_op_threads, at=EVERYWHERE)
def test_workers_of_one_machine_share_its_cores(results: list[Any], place: str) -> None:
    """TensorFlow's default of 0 means as many threads as cores, on each worker."""
    shared = place == TWO_WORKERS and len(os.sched_getaffinity(0)) == os.cpu_count()
    threads = max(1, (os.cpu_count() or 1) // 2) if shared else 0
    assert all(worker == threads for worker in results)


@behaviour(costs.training_without_connections, at=[TWO_WORKERS])
def test_workers_that_cannot_connect_train_by_tensorflows_collectives(results: list[Any]) -> None:
    """If one worker cannot reach another, all workers do so. The numbers are the same."""
    for (own, weights), (tensorflows, same) in results:
        assert own == [SEND]
        assert all(kind.startswith("Collective") for kind in tensorflows)
        assert tensorflows
        for one, other in zip(weights, same, strict=True):
            np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)
    assert results[0] == results[1]


@pytest.mark.parametrize("behaviour", [costs.update_kernels_of_a_step])
@pytest.mark.parametrize(
    ("place", "kernels"), [(ONE_DEVICE, 0), (TWO_REPLICAS, 2 * 4), (TWO_WORKERS, 4)]
)
def test_sgd_updates_by_a_kernel(results: list[Any], kernels: int) -> None:
    """It updates each of four variables on each local replica. One device updates as Keras does."""
    assert all(worker == kernels for worker in results)


@pytest.mark.parametrize("case", costs.OPTIMIZERS)
@behaviour(costs.updates_of_copies, at=[TWO_REPLICAS])
def test_one_update_of_all_copies_gives_the_numbers_of_an_update_on_each_replica(
    results: list[Any],
) -> None:
    """All numbers are equal to the bit, on both replicas. A step has fewer operations."""
    [((copies, operations), (expected, by_each))] = results
    assert copies == expected
    assert all(one == other for one, other in copies)
    assert operations < by_each


@behaviour(costs.tensorflow_calls_of_a_step, at=few(*SEVERAL, of=EVERYWHERE))
def test_a_step_is_one_call_and_traced_once(results: list[Any], place: str) -> None:
    """A batch with fewer rows needs no other trace.

    A step reads votes and rows; with several workers also the digest of the data, and whether a
    batch could not be read.
    """
    for calls, reads, traces in results:
        assert calls == 20
        assert reads == 20 * (4 if place == TWO_WORKERS else 2)
        assert traces == 1


@behaviour(costs.functions_converted_by_autograph, at=few(TWO_REPLICAS, of=EVERYWHERE))
def test_autograph_converts_only_steps_in_a_tf_function(results: list[Any]) -> None:
    """Keras converts no other step, and converting tfmulti's functions would take a second."""
    for keras_step, custom, in_a_function in results:
        assert keras_step == custom == []
        assert "tf__train_step" in in_a_function


@behaviour(costs.threads_left_by_fit, at=few(*SEVERAL, of=EVERYWHERE))
def test_fit_leaves_no_thread(results: list[Any]) -> None:
    assert all(worker == [] for worker in results)


@behaviour(costs.automatic_steps_per_execution, at=few(ONE_DEVICE, TWO_WORKERS, of=EVERYWHERE))
def test_all_workers_take_the_chiefs_steps_per_execution(results: list[Any], place: str) -> None:
    """After the trials the chief's number is sent with one step, or used at once.

    Steps that gather rows stay one per execution on several replicas.
    """
    for (single, exact), (chosen, weights), (gathering, _) in results:
        assert gathering == (chosen if place == ONE_DEVICE else single)
        assert single == list(range(STEPS_OF_AUTOMATIC_RUN))
        alone, last = TRIALS + 3, STEPS_OF_AUTOMATIC_RUN - 1
        assert chosen == [*range(alone), *range(alone + 6, last, 7), last]
        assert weights == exact

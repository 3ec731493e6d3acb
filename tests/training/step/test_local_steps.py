"""Workers that synchronize every H steps, compared with plain Keras and NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.behaviours import behaviour, local_steps
from tests.support.diloco import VARIANTS, expected_weights
from tests.support.places import THREE_WORKERS, TWO_WORKERS

pytestmark = pytest.mark.multiworker

AT_WORKERS = (TWO_WORKERS, THREE_WORKERS)
# To save time, the other variants run on two workers alone.
OF_THREE_WORKERS = ("momentum and a regularizer", "batch normalization", "a worker without rows")


def flat(weights: Any) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(value, np.float64)) for value in weights])


@pytest.mark.parametrize("behaviour", [local_steps.trained_with_local_steps])
@pytest.mark.parametrize(
    ("case", "place"),
    [(case, TWO_WORKERS) for case in VARIANTS]
    + [(case, THREE_WORKERS) for case in OF_THREE_WORKERS],
)
def test_local_steps_are_those_of_plain_keras(results: list[Any], case: str) -> None:
    """Each worker trains like plain Keras on its own rows. NumPy synchronizes the expected ones."""
    expected = flat(expected_weights(VARIANTS[case], len(results)))
    found = [flat(worker) for worker in results]
    assert all((other == found[0]).all() for other in found)
    assert np.abs(found[0] - expected).max() <= 1e-6


@behaviour(local_steps.synchronized_after_each_step, at=AT_WORKERS)
def test_synchronization_after_each_step_is_exact_training(results: list[Any]) -> None:
    """With plain SGD and an outer optimizer that takes the mean as it is, on uneven shares."""
    for worker in results:
        exact, local = map(flat, worker)
        assert np.abs(exact - local).max() <= 1e-6


@behaviour(local_steps.compressed_weight_changes, at=[TWO_WORKERS])
def test_changes_of_weights_can_be_compressed(results: list[Any]) -> None:
    for worker in results:
        whole, half = map(flat, worker)
        assert 0 < np.abs(whole - half).max() < 2.0**-11


@behaviour(local_steps.collectives_of_local_steps, at=AT_WORKERS)
def test_local_steps_have_no_collective(results: list[Any]) -> None:
    """An execution of several steps has two: one for metrics and votes, one for the weights."""
    for worker in results:
        exact_in_loop, _ = worker["exact"]
        assert exact_in_loop > 2
        assert worker["local"] == [0, 2]


@behaviour(local_steps.validation_after_local_steps, at=[TWO_WORKERS])
def test_validation_sees_the_synchronized_weights(results: list[Any]) -> None:
    assert all(other == results[0] for other in results)
    losses, loss_of_trained_model, _ = results[0]
    assert losses[-1] == pytest.approx(loss_of_trained_model, abs=1e-6)


@pytest.mark.parametrize(
    ("behaviour", "place"),
    [
        (local_steps.stopped_between_local_steps, TWO_WORKERS),
        (local_steps.stopped_between_local_steps, THREE_WORKERS),
        (local_steps.stopped_in_evaluation_after_local_steps, TWO_WORKERS),
    ],
)
def test_a_stopped_run_with_local_steps_resumes(results: list[Any]) -> None:
    """Bit for bit: each worker with its own slots, the outer optimizer with its velocity."""
    assert all(worker is True for worker in results)


@behaviour(local_steps.stop_training_on_one_worker, at=[TWO_WORKERS])
def test_all_workers_stop_at_the_same_synchronization(results: list[Any]) -> None:
    """The second worker stops at the first synchronization, and all learn of it at the second."""
    assert all(other == results[0] for other in results)
    seen, steps, _ = results[0]
    assert (seen, steps) == ([2, 5], 6)


@behaviour(local_steps.optimizer_slots_of_all_workers, at=AT_WORKERS)
def test_each_worker_keeps_its_own_slots(results: list[Any]) -> None:
    """A checkpoint has the slots of all. Another number of workers gets their mean."""
    kept = results[0][1]
    for rank, (own, all_slots, after, velocities) in enumerate(results):
        assert all_slots == kept
        assert [value[rank] for value in kept] == own
        assert velocities == 4
        for before, value in zip(own, after, strict=True):
            # The iteration is an integer, and the first worker's.
            is_iteration = np.asarray(before).dtype.kind == "i"
            assert np.unique(value).tolist() == [1 if is_iteration else 3]
    momenta = [flat([v for v in own if np.shape(v)]) for own, *_ in results]
    assert np.abs(momenta[0] - momenta[1]).max() > 1e-3


@behaviour(local_steps.errors_of_local_steps, at=[TWO_WORKERS])
def test_errors_say_what_to_do(results: list[Any]) -> None:
    for averages, unknown, other, none in results:
        assert "ModelError: the SGD has use_ema=True, and with --sync_every 2 its" in averages
        assert "DataError: --sync_every 2 needs data that tells how many batches" in unknown
        assert "ResumeError: saved sync_every=2, this run sync_every=3" in other
        assert "ResumeError: saved sync_every=2, this run sync_every=None" in none

"""Workers that meet every H steps: against plain Keras by hand, on two and on three workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.conftest import OF_THREE
from tests.support.apart import VARIANTS, by_hand

pytestmark = pytest.mark.multiworker

Workers = Callable[[int], list[dict[str, Any]]]
COUNTS = pytest.mark.parametrize("count", [2, 3])


def flat(weights: Any) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(value, np.float64)) for value in weights])


@pytest.mark.parametrize(
    ("count", "name"),
    [(2, name) for name in VARIANTS] + [(3, n) for n in VARIANTS if f"apart: {n}" in OF_THREE],
)
def test_as_by_hand(workers: Workers, count: int, name: str) -> None:
    """Each worker's steps are plain Keras' on its own rows, and NumPy makes them meet."""
    expected = flat(by_hand(VARIANTS[name], count))
    found = [flat(worker[f"apart: {name}"]) for worker in workers(count)]
    assert all((other == found[0]).all() for other in found)
    assert np.abs(found[0] - expected).max() <= 1e-6


@COUNTS
def test_meeting_after_each_step_is_exact_training(workers: Workers, count: int) -> None:
    """Of plain SGD, where the outer optimizer takes the mean as it is; the shares are uneven."""
    for worker in workers(count):
        exact, apart = map(flat, worker["meeting_after_each_step"])
        assert np.abs(exact - apart).max() <= 1e-6


def test_moves_travel_in_half_the_bytes_too(workers: Workers) -> None:
    for worker in workers(2):
        whole, half = map(flat, worker["meeting_in_half_the_bytes"])
        assert 0 < np.abs(whole - half).max() < 2.0**-11


@COUNTS
def test_local_steps_have_no_collective(workers: Workers, count: int) -> None:
    """In the loop of steps there is none; the whole execution has as few for many steps as
    for one.

    One has the metrics and votes, one (two phases of it) what the weights have moved.
    """
    for worker in workers(count):
        in_loop, whole = worker["collectives_of_local_steps"]["apart"]
        exact_in_loop, _ = worker["collectives_of_local_steps"]["exact"]
        assert exact_in_loop > 2
        assert (in_loop, whole) == (0, 2)


def test_validation_sees_what_all_have(workers: Workers) -> None:
    found = [worker["validated_apart"] for worker in workers(2)]
    assert all(other == found[0] for other in found)
    losses, left, _ = found[0]
    assert losses[-1] == pytest.approx(left, abs=1e-6)


@pytest.mark.parametrize(
    ("count", "name"),
    [(2, "stopped_apart"), (3, "stopped_apart"), (2, "stopped_apart_in_the_evaluation")],
)
def test_it_goes_on_as_if_never_stopped(workers: Workers, count: int, name: str) -> None:
    """To the bit, each worker with its own slots, the outer optimizer with its velocity."""
    assert [worker[name] for worker in workers(count)] == [True] * count


def test_all_stop_where_they_meet(workers: Workers) -> None:
    """The second worker's wish of the first meeting is known to all at the second."""
    found = [worker["one_worker_wants_to_stop"] for worker in workers(2)]
    assert all(other == found[0] for other in found)
    seen, steps, _ = found[0]
    assert (seen, steps) == ([2, 5], 6)


@COUNTS
def test_slots_stay_each_workers_own(workers: Workers, count: int) -> None:
    """A checkpoint has those of all; of another number of workers each gets the mean."""
    found = [worker["slots_of_other_workers"] for worker in workers(count)]
    kept = found[0][1]
    for rank, (own, all_slots, after, velocities) in enumerate(found):
        assert all_slots == kept
        assert [value[rank] for value in kept] == own
        assert velocities == 4
        for before, value in zip(own, after, strict=True):
            counts = np.asarray(before).dtype.kind == "i"  # the step's number: the first worker's
            assert np.unique(value).tolist() == [1 if counts else 3]
    momenta = [flat([v for v in own if np.shape(v)]) for own, *_ in found]
    assert np.abs(momenta[0] - momenta[1]).max() > 1e-3


def test_mistakes_say_what_to_do(workers: Workers) -> None:
    for worker in workers(2):
        averages, unknown, other, none = worker["mistakes_of_steps_apart"]
        assert "ModelError: the SGD has use_ema=True, and with --sync_every 2 its" in averages
        assert "DataError: --sync_every 2 needs data that tells how many batches" in unknown
        assert "ResumeError: saved sync_every=2, this run sync_every=3" in other
        assert "ResumeError: saved sync_every=2, this run sync_every=None" in none

"""Randomness, moving statistics, overflow and decisions: on replicas and on workers alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.behaviours.common import X
from tfmulti.data.sharding import batch_bounds, share_bounds

pytestmark = pytest.mark.multiworker

KINDS = pytest.mark.parametrize("kind", ["mirrored", "multi_worker_mirrored"])
Behaviours = Callable[..., list[dict[str, Any]]]


def moving_averages(
    rows: int, batch: int, replicas: int, steps_per_execution: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Returns moving mean and variance, averaged over the replicas after each execution.

    Each replica moves its own by half with each step in which it has rows, from 0 and 1, over
    the first rows of the behaviours' data in order; they are averaged by the rows of the
    execution.
    """
    steps = range(-(-rows // batch))
    common = np.stack([np.zeros(6), np.ones(6)])
    for start in steps[::steps_per_execution]:
        own, counts = [common.copy() for _ in range(replicas)], np.zeros(replicas)
        for step in steps[start : start + steps_per_execution]:
            first, last = batch_bounds(step, rows, batch)
            for replica in range(replicas):
                a, b = share_bounds(last - first, replicas, replica)
                part = X[first + a : first + b].astype(np.float64)
                if len(part):
                    moment = np.stack([part.mean(0), part.var(0)])
                    own[replica] = 0.5 * own[replica] + 0.5 * moment
                    counts[replica] += len(part)
        common = np.average(own, axis=0, weights=counts)
    return common[0], common[1]


@KINDS
def test_own_statistics_are_averaged_by_rows(behaviours: Behaviours, kind: str) -> None:
    mean, variance = moving_averages(61, 24, 2)
    early_mean, early_variance = moving_averages(48, 24, 2)
    for worker in behaviours(kind, 2):
        (means, variances), saved = worker["own_statistics_are_averaged_by_rows"]
        assert all(found == pytest.approx(mean, abs=1e-6) for found in means)
        assert all(found == pytest.approx(variance, abs=1e-6) for found in variances)
        assert saved[0] == pytest.approx(early_mean, abs=1e-6)
        assert saved[1] == pytest.approx(early_variance, abs=1e-6)


@KINDS
def test_they_are_averaged_after_several_steps(behaviours: Behaviours, kind: str) -> None:
    """With 25 rows in two steps of one execution: in the second one replica has no rows."""
    mean, variance = moving_averages(25, 24, 2, steps_per_execution=3)
    for worker in behaviours(kind, 2):
        means, variances = worker["own_statistics_of_several_steps_an_execution"]
        assert all(found == pytest.approx(mean, abs=1e-6) for found in means)
        assert all(found == pytest.approx(variance, abs=1e-6) for found in variances)


@KINDS
def test_a_replica_without_rows_leaves_statistics_alone(behaviours: Behaviours, kind: str) -> None:
    mean, variance = moving_averages(25, 24, 2)
    for worker in behaviours(kind, 2):
        validated, evaluated, alone, (means, variances) = worker["own_statistics_without_rows"]
        assert validated == pytest.approx(alone, abs=1e-6)
        assert evaluated == pytest.approx(alone, abs=1e-6)
        assert all(found == pytest.approx(mean, abs=1e-6) for found in means)
        assert all(found == pytest.approx(variance, abs=1e-6) for found in variances)


@KINDS
def test_frozen_layers_stay_as_they_are(behaviours: Behaviours, kind: str) -> None:
    for worker in behaviours(kind, 2):
        expected = np.linspace(0.1, 0.7, 6).astype(np.float32).tolist()
        assert all(found == expected for found in worker["frozen_layers_stay_as_they_are"])


@KINDS
@pytest.mark.parametrize("name", ["masks_of_dropout", "one_mask_for_all_rows", "augmented_images"])
def test_random_numbers_are_those_of_one_device(
    behaviours: Behaviours, kind: str, name: str
) -> None:
    one = behaviours("one_device")[0][name]
    for worker in behaviours(kind, 2):
        assert np.asarray(worker[name]) == pytest.approx(np.asarray(one), abs=1e-5)


@KINDS
def test_no_two_rows_and_no_two_calls_share_a_mask(behaviours: Behaviours, kind: str) -> None:
    first, second = (np.asarray(masks) for masks in behaviours(kind, 2)[0]["masks_of_dropout"])
    rows = [tuple(row) for row in [*first, *second]]
    assert len(set(rows)) == len(rows) == 26
    assert 0.4 < (first == 0).mean() < 0.6


@KINDS
def test_choices_differ_between_replicas(behaviours: Behaviours, kind: str) -> None:
    for worker in behaviours(kind, 2):
        rows = [tuple(row) for row in worker["choices_differ_between_replicas"]]
        assert len(set(rows)) == 8
        assert worker == behaviours(kind, 2)[0] or rows == [
            tuple(row) for row in behaviours(kind, 2)[0]["choices_differ_between_replicas"]
        ]


def test_weights_start_equal(behaviours: Behaviours) -> None:
    found = [
        replica
        for worker in behaviours("multi_worker_mirrored", 2)
        for replica in worker["weights_start_equal"]
    ]
    assert len(found) == 2
    assert all(one == other for one, other in itertools.pairwise(found))


@KINDS
def test_an_overflow_on_one_replica_skips_the_step_everywhere(
    behaviours: Behaviours, kind: str
) -> None:
    """Three of four steps are taken and the scale of 64 is halved, as on one device."""
    one = behaviours("one_device")[0]["overflow_on_one_replica_skips_the_step"]
    assert one[:3] == [3, 32.0, True]
    workers = behaviours(kind, 2)
    for worker in workers:
        steps, scale, finite, weights = worker["overflow_on_one_replica_skips_the_step"]
        assert [steps, scale, finite] == one[:3]
        assert weights == workers[0]["overflow_on_one_replica_skips_the_step"][3]
        for found, expected in zip(weights, one[3], strict=True):
            assert np.asarray(found) == pytest.approx(np.asarray(expected), abs=1e-3)


@KINDS
@pytest.mark.parametrize("name", ["running_logs", "learning_rates_and_best_models"])
def test_what_is_shown_and_decided_is_of_the_global_data(
    behaviours: Behaviours, kind: str, name: str
) -> None:
    one = behaviours("one_device")[0][name]
    workers = behaviours(kind, 2)
    for worker in workers:
        assert worker[name] == workers[0][name]  # alike to the bit
        for found, expected in zip(worker[name], one, strict=True):
            assert np.asarray(found) == pytest.approx(np.asarray(expected), abs=2e-6)


def test_something_was_decided(behaviours: Behaviours) -> None:
    rates, losses, best, _ = behaviours("one_device")[0]["learning_rates_and_best_models"]
    assert len(rates) < 12  # stopped early
    assert len(set(rates)) > 2  # lowered twice or more
    assert best[-1] == min(losses) < losses[-1]


@KINDS
def test_losses_of_outputs_are_those_of_keras(behaviours: Behaviours, kind: str) -> None:
    for worker in [*behaviours(kind, 2), *behaviours("one_device")]:
        kind_loss, size_loss, expected_kind, expected_size = worker["losses_of_outputs"]
        assert kind_loss == pytest.approx(expected_kind, abs=1e-6)
        assert size_loss == pytest.approx(expected_size, abs=1e-5)


@KINDS
def test_a_step_of_several_passes_counts_once(behaviours: Behaviours, kind: str) -> None:
    for worker in behaviours(kind, 2):
        assert worker["one_update_a_step_with_microbatches"] == [8, 8]


@KINDS
def test_preparing_again_counts(behaviours: Behaviours, kind: str) -> None:
    for worker in behaviours(kind, 2):
        synchronized, own, again = worker["prepared_again"]
        assert again == synchronized
        assert abs(own - synchronized) > 1e-4


@KINDS
def test_noise_needs_no_seed(behaviours: Behaviours, kind: str) -> None:
    workers = behaviours(kind, 2)
    for worker in workers:
        assert worker["noise_without_a_seed"] == workers[0]["noise_without_a_seed"]
        assert np.isfinite(worker["noise_without_a_seed"]["loss"]).all()


def test_the_end_of_data_is_no_step(behaviours: Behaviours) -> None:
    """Keras alone draws seeds and counts a step when it finds the end of an unknown length."""
    for place in (("one_device",), ("mirrored", 2), ("multi_worker_mirrored", 2)):
        for worker in behaviours(*place):
            known, unknown = worker["data_of_unknown_length"]
            assert unknown == known
            assert known[0] == 6


@KINDS
def test_gradients_in_half_the_bytes(behaviours: Behaviours, kind: str) -> None:
    """Alike on all workers and rounded there; within a machine nothing travels."""
    workers = [worker["gradients_in_half_the_bytes"] for worker in behaviours(kind, 2)]
    assert all(worker == workers[0] for worker in workers)
    found = {
        name: np.concatenate([np.ravel(weight) for weight in weights])
        for name, weights in workers[0].items()
    }
    for name, digits in (("float16", 11), ("bfloat16", 8)):
        difference = np.abs(found[name] - found["none"]).max()
        if kind == "mirrored":
            assert difference == 0
        else:
            assert 0 < difference < 2.0**-digits


def test_what_gradients_travel_as(behaviours: Behaviours) -> None:
    """Packs of 2.4 and 1.6 MB, or half, are a collective each; the rows of an embedding stay."""
    for worker in behaviours("multi_worker_mirrored", 2):
        for name, types in worker["what_gradients_travel_as"].items():
            dense = "float32" if name == "none" else name
            assert types == [dense, dense, "float32", "int32"]

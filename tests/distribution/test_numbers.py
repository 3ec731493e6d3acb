"""Tests random numbers, moving statistics, overflow and decisions on replicas and workers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.support.behaviours import behaviour, numbers
from tests.support.behaviours.common import X
from tests.support.places import (
    EVERYWHERE,
    ONE_DEVICE,
    SEVERAL,
    THREE_WORKERS,
    TWO_REPLICAS,
    TWO_WORKERS,
    few,
)
from tfmulti.data.sharding import batch_bounds, slice_bounds

pytestmark = pytest.mark.multiworker


def moving_averages(
    rows: int, batch: int, replicas: int, steps_per_execution: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the moving mean and variance of the first rows of `X`, in their order.

    The statistics of a replica begin at 0 and 1. Each step in which the replica has rows moves
    them halfway. After each execution they are averaged over the replicas, weighted by rows.
    """
    steps = range(-(-rows // batch))
    common = np.stack([np.zeros(6), np.ones(6)])
    for start in steps[::steps_per_execution]:
        own, counts = [common.copy() for _ in range(replicas)], np.zeros(replicas)
        for step in steps[start : start + steps_per_execution]:
            first, last = batch_bounds(step, rows, batch)
            for replica in range(replicas):
                a, b = slice_bounds(last - first, replicas, replica)
                part = X[first + a : first + b].astype(np.float64)
                if len(part):
                    moment = np.stack([part.mean(0), part.var(0)])
                    own[replica] = 0.5 * own[replica] + 0.5 * moment
                    counts[replica] += len(part)
        common = np.average(own, axis=0, weights=counts)
    return common[0], common[1]


@behaviour(numbers.moving_statistics_of_an_epoch, at=SEVERAL)
def test_moving_statistics_are_averaged_by_rows(results: list[Any]) -> None:
    mean, variance = moving_averages(61, 24, 2)
    mean_of_two_steps, variance_of_two_steps = moving_averages(48, 24, 2)
    for (means, variances), saved in results:
        assert all(found == pytest.approx(mean, abs=1e-6) for found in means)
        assert all(found == pytest.approx(variance, abs=1e-6) for found in variances)
        assert saved[0] == pytest.approx(mean_of_two_steps, abs=1e-6)
        assert saved[1] == pytest.approx(variance_of_two_steps, abs=1e-6)


@behaviour(
    numbers.moving_statistics_of_several_steps_per_execution, at=few(TWO_WORKERS, of=SEVERAL)
)
def test_moving_statistics_are_averaged_once_per_execution(results: list[Any]) -> None:
    """An execution has two steps with 25 rows. In the second step, one replica has no rows."""
    mean, variance = moving_averages(25, 24, 2, steps_per_execution=3)
    for means, variances in results:
        assert all(found == pytest.approx(mean, abs=1e-6) for found in means)
        assert all(found == pytest.approx(variance, abs=1e-6) for found in variances)


@behaviour(numbers.moving_statistics_with_an_empty_replica, at=few(TWO_REPLICAS, of=SEVERAL))
def test_a_replica_without_rows_does_not_move_statistics(results: list[Any]) -> None:
    mean, variance = moving_averages(25, 24, 2)
    for validated, evaluated, saved, (means, variances) in results:
        assert validated == pytest.approx(saved, abs=1e-6)
        assert evaluated == pytest.approx(saved, abs=1e-6)
        assert all(found == pytest.approx(mean, abs=1e-6) for found in means)
        assert all(found == pytest.approx(variance, abs=1e-6) for found in variances)


@behaviour(numbers.moving_statistics_of_a_frozen_layer, at=few(TWO_REPLICAS, of=SEVERAL))
def test_statistics_of_a_frozen_layer_do_not_change(results: list[Any]) -> None:
    expected = np.linspace(0.1, 0.7, 6).astype(np.float32).tolist()
    for worker in results:
        assert all(found == expected for found in worker)


@behaviour(
    numbers.dropout_masks,
    numbers.dropout_mask_shared_by_all_rows,
    numbers.augmented_images,
    at=SEVERAL,
)
def test_random_numbers_are_those_of_one_device(results: list[Any], one_device: Any) -> None:
    for worker in results:
        assert np.asarray(worker) == pytest.approx(np.asarray(one_device), abs=1e-5)


@behaviour(numbers.dropout_masks, at=SEVERAL)
def test_no_two_rows_and_no_two_calls_share_a_mask(results: list[Any]) -> None:
    first, second = map(np.asarray, results[0])
    rows = [tuple(row) for row in [*first, *second]]
    assert len(set(rows)) == len(rows) == 26
    assert 0.4 < (first == 0).mean() < 0.6


@behaviour(numbers.categorical_draws, at=SEVERAL)
def test_draws_of_categories_differ_between_replicas(results: list[Any]) -> None:
    for worker in results:
        assert len(set(map(tuple, worker))) == 8
        assert worker == results[0]


@behaviour(numbers.initial_weights_of_differently_seeded_workers, at=[TWO_WORKERS])
def test_weights_start_equal(results: list[Any]) -> None:
    replicas = [replica for worker in results for replica in worker]
    assert len(replicas) == 2
    assert all(one == other for one, other in itertools.pairwise(replicas))


@behaviour(numbers.overflow_on_one_replica, at=SEVERAL)
def test_an_overflow_on_one_replica_skips_the_step_everywhere(
    results: list[Any], one_device: Any
) -> None:
    """Three of four steps are taken and the scale of 64 is halved, as on one device."""
    assert one_device[:3] == [3, 32.0, True]
    for steps, scale, finite, weights in results:
        assert [steps, scale, finite] == one_device[:3]
        assert weights == results[0][3]
        for found, expected in zip(weights, one_device[3], strict=True):
            assert np.asarray(found) == pytest.approx(np.asarray(expected), abs=1e-3)


@behaviour(numbers.logs_of_every_step, numbers.callbacks_that_monitor_the_loss, at=SEVERAL)
def test_logs_and_decisions_of_callbacks_are_those_of_one_device(
    results: list[Any], one_device: Any
) -> None:
    """They are alike on all workers, bit for bit."""
    for worker in results:
        assert worker == results[0]
        for found, expected in zip(worker, one_device, strict=True):
            assert np.asarray(found) == pytest.approx(np.asarray(expected), abs=2e-6)


@behaviour(numbers.callbacks_that_monitor_the_loss, at=[ONE_DEVICE])
def test_callbacks_stop_early_and_lower_the_learning_rate(results: list[Any]) -> None:
    [(rates, losses, best, _)] = results
    assert len(rates) < 12
    assert len(set(rates)) > 2
    assert best[-1] == min(losses) < losses[-1]


@behaviour(numbers.losses_of_two_outputs, at=few(*SEVERAL, of=EVERYWHERE))
def test_losses_of_outputs_are_those_of_keras(results: list[Any]) -> None:
    """The last of three batches has 13 rows, and the others 24."""
    for kind_loss, size_loss, expected_kind, expected_size, trained, plain in results:
        assert kind_loss == pytest.approx(expected_kind, abs=1e-6)
        assert size_loss == pytest.approx(expected_size, abs=1e-5)
        assert trained.keys() == plain.keys() >= {"kind_loss", "size_loss"}
        for name, values in plain.items():
            assert trained[name] == pytest.approx(values, abs=1e-5)


@behaviour(numbers.losses_of_predictions_that_are_not_understood, at=SEVERAL)
def test_a_loss_may_compare_rows_whose_origin_is_not_understood(
    results: list[Any], one_device: Any
) -> None:
    for worker in results:
        for found, expected in zip(worker, one_device, strict=True):
            for name, values in expected.items():
                assert found[name] == pytest.approx(values, abs=1e-5)


@behaviour(numbers.steps_counted_with_microbatches, at=few(TWO_REPLICAS, of=SEVERAL))
def test_a_step_with_microbatches_counts_once(results: list[Any]) -> None:
    assert all(worker == [8, 8] for worker in results)


@behaviour(numbers.prepared_three_times, at=few(TWO_REPLICAS, of=SEVERAL))
def test_the_options_of_the_last_prepare_count(results: list[Any]) -> None:
    for synchronized, unsynchronized, again in results:
        assert again == synchronized
        assert abs(unsynchronized - synchronized) > 1e-4


@behaviour(numbers.noise_without_a_seed, at=few(TWO_WORKERS, of=SEVERAL))
def test_noise_without_a_seed_is_alike_on_all_workers(results: list[Any]) -> None:
    for worker in results:
        assert worker == results[0]
        assert np.isfinite(worker["loss"]).all()


@behaviour(numbers.dataset_of_unknown_length, at=few(ONE_DEVICE, TWO_WORKERS, of=EVERYWHERE))
def test_the_end_of_a_dataset_is_no_step(results: list[Any]) -> None:
    """Keras alone draws seeds and counts a step when it finds the end of an unknown length."""
    for known, unknown in results:
        assert unknown == known
        assert known[0] == 6


def rounded(values: np.ndarray, digits: int) -> np.ndarray:
    """Returns values rounded to `digits` binary digits, to the nearest, ties to even."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.round(mantissa * 2.0**digits), exponent - digits)


@behaviour(numbers.sums_of_compressed_gradients, at=[THREE_WORKERS])
@pytest.mark.parametrize(("name", "digits"), [("none", 24), ("float16", 11), ("bfloat16", 8)])
def test_compressed_gradients_are_added_in_float32(
    results: list[Any], name: str, digits: int
) -> None:
    """They are rounded before they are sent. Their sum is rounded again."""
    shares = [
        np.random.default_rng(rank).standard_normal([40, 50]).astype(np.float32)
        for rank in range(len(results))
    ]
    total = rounded(sum(rounded(share, digits) for share in shares), digits)
    for worker in results:
        large, many_digits, rows = worker[name]
        # bfloat16 has no number between 2048 and 2064.
        assert large == [[2048 if name == "bfloat16" else 2050] * 2] * 2
        assert np.abs(np.array(many_digits) - total).max() <= (1e-6 if name == "none" else 0)
        assert rows == [[3, 3], [0, 0], [0, 0]]


@behaviour(numbers.training_with_compressed_gradients, at=(*SEVERAL, THREE_WORKERS))
def test_compressed_gradients_change_little(results: list[Any], place: str) -> None:
    """They are alike on all workers. Replicas of one process send nothing."""
    assert all(worker == results[0] for worker in results)
    found = {
        name: np.concatenate([np.ravel(weight) for weight in weights])
        for name, weights in results[0].items()
    }
    for name, digits in (("float16", 11), ("bfloat16", 8)):
        difference = np.abs(found[name] - found["none"]).max()
        if place == TWO_REPLICAS:
            assert difference == 0
        else:
            assert 0 < difference < 2.0**-digits


@behaviour(numbers.types_of_compressed_gradients, at=[TWO_WORKERS])
def test_dense_gradients_are_sent_in_the_compressed_type(results: list[Any]) -> None:
    """Each of two gradients is a bucket and one collective: 2.4 and 1.6 MB, or half of it.

    The rows of an embedding keep their type, and are sent with their indices.
    """
    for worker in results:
        for name, types in worker.items():
            dense = "float32" if name == "none" else name
            assert types == [dense, dense, "float32", "int32"]

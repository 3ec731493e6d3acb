"""Tests the batch plan: each epoch has each example once, in a new order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfmulti.data.batch_plan import BatchPlan
from tfmulti.data.hashing import key_of, uniform
from tfmulti.data.permutation import MAX_STORED, Permutation


def epoch_of(plan: BatchPlan, epoch: int, workers: int = 1, local: int = 1) -> list[int]:
    """Returns the examples of an epoch in order, joined from the slices of the replicas."""
    order: list[int] = []
    for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
        for rank in range(workers):
            part = plan.part(step, rank * local, local, workers * local)
            examples = plan.examples_of(part)
            for first, last, counts in part.slices:
                if counts:
                    order += examples[first - part.begin : last - part.begin].tolist()
    return order


@pytest.mark.parametrize(("workers", "local"), [(1, 1), (1, 3), (3, 1), (2, 4), (1, 8)])
def test_each_example_is_read_once_on_any_number_of_replicas(workers: int, local: int) -> None:
    plan = BatchPlan(examples=25, global_batch_size=6, seed=3)
    order = epoch_of(plan, 0, workers, local)
    assert sorted(order) == list(range(25))
    assert order == epoch_of(plan, 0)


@pytest.mark.parametrize("examples", [200, MAX_STORED + 300])
def test_each_epoch_has_a_new_order(examples: int) -> None:
    plan = BatchPlan(examples, examples, seed=3)
    orders = [plan.examples_at(epoch, 0, examples) for epoch in range(3)]
    orders += [
        np.arange(examples),
        BatchPlan(examples, examples, seed=4).examples_at(0, 0, examples),
    ]
    for one, other in itertools.combinations(orders, 2):
        # By chance one example on average keeps its position.
        assert (one == other).sum() < 10
    assert np.array_equal(orders[0], BatchPlan(examples, 7, seed=3).examples_at(0, 0, examples))


def test_without_a_seed_the_order_does_not_change() -> None:
    assert epoch_of(BatchPlan(25, 6), 1, 3) == list(range(25))


@pytest.mark.parametrize(
    "size", [1, 2, 3, 7, 100, MAX_STORED, MAX_STORED + 1, 70_000, 317**2, 317**2 + 1]
)
def test_an_order_holds_each_number_once(size: int) -> None:
    order = Permutation(size, key=11).at(np.arange(size))
    assert np.array_equal(np.sort(order), np.arange(size))


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("size", [16, 40, 101])
def test_positions_are_uniform_over_epochs(
    size: int, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computes chi-square of example and position over 2,000 epochs, for both kinds of orders."""
    if not held:
        monkeypatch.setattr("tfmulti.data.permutation.MAX_STORED", 0)
    counts, epochs = np.zeros((size, size)), 2000
    for epoch in range(epochs):
        counts[np.arange(size), Permutation(size, key_of(0, epoch)).at(np.arange(size))] += 1
    check_uniform(counts, epochs / size, freedom=(size - 1) ** 2)


def test_positions_of_a_large_order_are_uniform() -> None:
    """Computes chi-square over 128×128 blocks of examples and positions, 30 epochs of 131,072."""
    size, blocks, epochs = 1 << 17, 128, 30
    counts = np.zeros((blocks, blocks))
    block = np.arange(size) // (size // blocks)
    for epoch in range(epochs):
        order = Permutation(size, key_of(5, epoch)).at(np.arange(size))
        np.add.at(counts, (block, block[order]), 1)
    check_uniform(counts, size * epochs / blocks**2, freedom=(blocks - 1) ** 2)


def test_neighbours_do_not_stay_neighbours() -> None:
    """The distance of consecutive examples is that of a random order: 1/3 on average."""
    size = 1 << 18
    order = Permutation(size, key=3).at(np.arange(size)).astype(float)
    distance = np.abs(np.diff(order)) / size
    assert abs(distance.mean() - 1 / 3) < 5 * 0.236 / size**0.5
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / size**0.5


def test_fixed_points_between_epochs_are_those_of_chance() -> None:
    """Two random orders agree at one position on average. Over 300 pairs the sum is 300 ± 17."""
    orders = [Permutation(500, key_of(9, epoch)).at(np.arange(500)) for epoch in range(301)]
    agreeing = sum(int((a == b).sum()) for a, b in itertools.pairwise(orders))
    assert abs(agreeing - 300) < 5 * 300**0.5


def check_uniform(counts: np.ndarray, expected: float, freedom: int) -> None:
    """Fails if chi-square is more than five standard deviations away from its mean."""
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


def test_a_step_of_a_billion_examples_permutes_only_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No list of all examples is made: only the indices of the rows that are read are permuted."""
    counts: list[int] = []
    once = Permutation._once
    monkeypatch.setattr(
        Permutation,
        "_once",
        lambda self, numbers: counts.append(len(numbers)) or once(self, numbers),
    )
    plan = BatchPlan(10**9, 256, seed=1)
    part = plan.part(plan.steps_per_epoch - 2, 3, 1, 4)
    examples = plan.examples_of(part)
    assert len(set(examples.tolist())) == 64
    assert max(counts) == 64
    assert examples.min() >= 0
    assert examples.max() < 10**9


@given(
    examples=st.integers(1, 60),
    batch=st.integers(1, 20),
    shape=st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 1), (1, 8), (2, 3)]),
    step=st.integers(0, 100),
)
@settings(max_examples=200, deadline=None)
def test_slices_know_their_position_in_the_batch(
    examples: int, batch: int, shape: tuple[int, int], step: int
) -> None:
    """Each slice begins where the previous one ends, on any number of workers."""
    workers, local = shape
    plan = BatchPlan(examples, batch, seed=2)
    at = 0
    for rank in range(workers):
        part = plan.part(step, rank * local, local, workers * local)
        assert part.begin == min(first for first, _, _ in part.slices)
        assert len(plan.examples_of(part)) == part.end - part.begin
        for first, last, counts in part.slices:
            assert first == (at if counts else part.rows - 1)
            assert last - first >= 1
            at += (last - first) * counts
    assert at == part.rows


def test_random_numbers_belong_to_their_example() -> None:
    examples = np.array([5, 0, 17])
    all_of_them = uniform(key_of(1, 2), np.arange(20), 3)
    assert np.array_equal(uniform(key_of(1, 2), examples, 3), all_of_them[examples])
    assert np.array_equal(uniform(key_of(1, 2), examples, 2), all_of_them[examples][:, :2])
    assert not np.array_equal(uniform(key_of(1, 3), examples, 3), all_of_them[examples])


def test_random_numbers_are_uniform() -> None:
    drawn = uniform(key_of(4), np.arange(20_000), 4)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    for column in drawn.T:
        counts = np.histogram(column, 100, (0, 1))[0]
        check_uniform(counts, 200, freedom=99)
    assert np.abs(np.corrcoef(drawn.T) - np.eye(4)).max() < 5 / 20_000**0.5

"""The plan: each epoch holds each example once, in an order of its own, on any replicas."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfmulti.pipeline import Plan, from_source
from tfmulti.sources.arrays import ArraySource
from tfmulti.strategies import Placement


def epoch_of(plan: Plan, epoch: int, replicas: int) -> list[int]:
    """Returns the examples of an epoch, in order, as the replicas' shares put together."""
    found: list[int] = []
    for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
        for replica in range(replicas):
            indices, own, _, _ = plan.indices(tf.constant(step, tf.int64), replica, replicas)
            found += indices.numpy()[: int(own)].tolist()
    return found


@pytest.mark.parametrize("replicas", [1, 3, 8])
def test_each_example_once_whatever_the_replicas(replicas: int) -> None:
    plan = Plan(examples=25, global_batch_size=6, seed=3)
    found = epoch_of(plan, 0, replicas)
    assert sorted(found) == list(range(25))
    assert found == epoch_of(plan, 0, 1)


def test_each_epoch_is_shuffled_anew() -> None:
    plan = Plan(examples=200, global_batch_size=50, seed=3)
    orders = [epoch_of(plan, epoch, 2) for epoch in range(3)]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        same = sum(a == b for a, b in zip(orders[one], orders[other], strict=True))
        assert same < 10  # one on average, by chance
    assert orders[0] != list(range(200))
    assert orders[0] != epoch_of(Plan(200, 50, seed=4), 0, 2)
    assert orders[0] == epoch_of(Plan(200, 50, seed=3), 0, 2)


def test_without_a_seed_the_order_stays() -> None:
    assert epoch_of(Plan(25, 6), 1, 3) == list(range(25))


def test_positions_are_uniform_over_epochs() -> None:
    """Chi-square of example against position over 400 epochs: 225 degrees of freedom."""
    plan, epochs = Plan(examples=16, global_batch_size=16, seed=0), 400
    counts = np.zeros((16, 16))
    for epoch in range(epochs):
        counts[np.arange(16), epoch_of(plan, epoch, 1)] += 1
    expected = epochs / 16
    assert ((counts - expected) ** 2 / expected).sum() < 300  # 0.1 % would be above 297


def test_a_worker_reads_its_own_rows_alone() -> None:
    x = np.arange(20, dtype=np.float32)
    source, plan = ArraySource((x,)), Plan(20, 8, seed=1)
    seen = []
    for rank in range(2):
        data = from_source(source, plan, Placement(rank, 2, 1)).take(3)
        seen.append([s.data[0][0].numpy()[: int(s.own_rows[0])].tolist() for s in data])
    assert [len(rows) for rows in seen[0]] == [4, 4, 2]
    assert sorted(v for worker in seen for rows in worker for v in rows) == x.tolist()


@pytest.mark.parametrize(("workers", "local"), [(1, 1), (1, 3), (2, 1), (3, 1), (2, 4)])
def test_workers_read_each_row_of_an_epoch_once(workers: int, local: int) -> None:
    """Counts what is read, not what is counted: 25 rows in batches of 8, the last of one row."""
    source, plan = ArraySource((np.arange(25, dtype=np.float32),)), Plan(25, 8, seed=1)
    batches: list[list[float]] = [[] for _ in range(4)]
    read: list[float] = []
    without_rows = 0
    for rank in range(workers):
        data = from_source(source, plan, Placement(rank, workers, local)).take(4)
        for step, shards in enumerate(data):
            for (x,), own in zip(shards.data, shards.own_rows, strict=True):
                batches[step] += x.numpy()[: int(own)].tolist()
                read += x.numpy().tolist()
                without_rows += int(own) == 0
    assert without_rows == max(0, workers * local - 1)  # of the last batch's one row
    assert len(read) == 25 + without_rows  # one more each, which does not count
    assert sorted(itertools.chain(*batches)) == list(range(25))
    assert batches == [
        [float(i) for i in epoch_of(plan, 0, 1)[8 * k : 8 * k + 8]] for k in range(4)
    ]


@given(
    examples=st.integers(1, 60),
    batch=st.integers(1, 20),
    shape=st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 1), (1, 8), (2, 3)]),
    step=st.integers(0, 100),
)
@settings(max_examples=60, deadline=None)
def test_shares_know_where_they_stand(
    examples: int, batch: int, shape: tuple[int, int], step: int
) -> None:
    """Each share begins where the one before ends, on any number of workers."""
    workers, local = shape
    plan = Plan(examples, batch, seed=2)
    at = 0
    for replica in range(workers * local):
        indices, own, first, rows = plan.indices(
            tf.constant(step, tf.int64), replica, workers * local
        )
        assert int(first) == (at if int(own) else int(rows) - 1)
        assert len(indices) == max(1, int(own))
        at += int(own)
    assert at == int(rows)


def test_an_iterator_starts_at_any_step() -> None:
    source, plan = ArraySource((np.arange(20, dtype=np.float32),)), Plan(20, 6, seed=1)
    place = Placement(0, 1, 2)
    whole = [s.data[1][0].numpy().tolist() for s in from_source(source, plan, place).take(9)]
    rest = [s.data[1][0].numpy().tolist() for s in from_source(source, plan, place, 5).take(4)]
    assert rest == whole[5:]

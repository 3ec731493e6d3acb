"""The plan: each epoch holds each example once, in an order of its own, on any replicas."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfmulti.pipeline import Plan, from_source
from tfmulti.sources.arrays import ArraySource
from tfmulti.strategies import Placement


def epoch_of(plan: Plan, epoch: int, replicas: int) -> list[int]:
    """Returns the examples of an epoch, in order, as the replicas' shares put together."""
    found: list[int] = []
    for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
        for replica in range(replicas):
            indices, own, _ = plan.indices(tf.constant(step, tf.int64), replica, replicas)
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


def test_an_iterator_starts_at_any_step() -> None:
    source, plan = ArraySource((np.arange(20, dtype=np.float32),)), Plan(20, 6, seed=1)
    place = Placement(0, 1, 2)
    whole = [s.data[1][0].numpy().tolist() for s in from_source(source, plan, place).take(9)]
    rest = [s.data[1][0].numpy().tolist() for s in from_source(source, plan, place, 5).take(4)]
    assert rest == whole[5:]

"""Tests properties of sharding: a balanced partition in order, for any number of workers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tfmulti.data.sharding import batch_bounds, slice_bounds, steps_per_epoch

ROWS = st.integers(0, 5000)
REPLICAS = st.integers(1, 300)


@given(rows=ROWS, replicas=REPLICAS)
def test_slices_are_a_partition_in_order(rows: int, replicas: int) -> None:
    slices = [slice_bounds(rows, replicas, r) for r in range(replicas)]
    assert slices[0][0] == 0
    assert slices[-1][1] == rows
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(slices))


@given(rows=ROWS, replicas=REPLICAS)
def test_slices_differ_by_one_row_at_most(rows: int, replicas: int) -> None:
    sizes = [
        stop - start for start, stop in (slice_bounds(rows, replicas, r) for r in range(replicas))
    ]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(examples=st.integers(1, 5000), batch=st.integers(1, 600))
def test_batches_hold_each_position_once(examples: int, batch: int) -> None:
    bounds = [batch_bounds(k, examples, batch) for k in range(steps_per_epoch(examples, batch))]
    assert [p for start, stop in bounds for p in range(start, stop)] == list(range(examples))
    assert all(stop - start == batch for start, stop in bounds[:-1])


@given(
    rows=ROWS, replicas=st.sampled_from([1, 2, 3, 4, 6, 8, 12]), workers=st.sampled_from([1, 2, 3])
)
def test_the_number_of_workers_does_not_matter(rows: int, replicas: int, workers: int) -> None:
    if replicas % workers:
        return
    local = replicas // workers
    by_worker = [
        slice_bounds(rows, replicas, worker * local + i)
        for worker in range(workers)
        for i in range(local)
    ]
    assert by_worker == [slice_bounds(rows, replicas, r) for r in range(replicas)]

"""Tests the path from a source to the replicas: each row once, from any step on."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.data.test_batch_plan import epoch_of
from tfmulti.config.reading import ReadOptions
from tfmulti.data.arrays import ArraySource
from tfmulti.data.batch_plan import BatchPlan
from tfmulti.data.buffers import empty
from tfmulti.distribution.strategies import Placement
from tfmulti.errors import DataError
from tfmulti.training.input.feed import DataArguments, make_feed
from tfmulti.training.input.prefetcher import as_tensor, prefetcher_of

pytestmark = pytest.mark.mirrored

ALONE = Placement(0, 1, 1)


def batches_of(
    source: Any,
    plan: BatchPlan,
    place: Placement,
    steps: int,
    first: int = 0,
    threads: int | None = None,
) -> list[Any]:
    with contextlib.closing(
        prefetcher_of(source, plan, place, first, ReadOptions(threads))
    ) as stream:
        return [stream.queue.take() for _ in range(steps)]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    gc.collect()
    assert not [t for t in threading.enumerate() if t not in before]


@pytest.mark.parametrize("threads", [None, 0, 3])
@pytest.mark.parametrize(("workers", "local"), [(1, 1), (1, 3), (2, 1), (3, 1), (2, 4)])
def test_workers_read_each_row_of_an_epoch_once(
    workers: int, local: int, threads: int | None
) -> None:
    """25 rows in batches of 8: the last batch has one row, and replicas without rows read one."""
    source, plan = ArraySource((np.arange(25, dtype=np.float32),)), BatchPlan(25, 8, seed=1)
    batches: list[list[float]] = [[] for _ in range(4)]
    read: list[float] = []
    without_rows = 0
    for rank in range(workers):
        place = Placement(rank, workers, local)
        for step, batch in enumerate(batches_of(source, plan, place, 4, threads=threads)):
            for (x,), own in zip(batch.data, batch.own_rows, strict=True):
                batches[step] += x.numpy()[: int(own)].tolist()
                read += x.numpy().tolist()
                without_rows += int(own) == 0
    # The last batch has one row, so only one replica has a row.
    assert without_rows == max(0, workers * local - 1)
    # Each replica without rows reads one row that does not count.
    assert len(read) == 25 + without_rows
    assert sorted(itertools.chain(*batches)) == list(range(25))
    assert batches == [[float(i) for i in epoch_of(plan, 0)[8 * k : 8 * k + 8]] for k in range(4)]


@pytest.mark.parametrize("threads", [0, 2])
def test_an_iterator_starts_at_any_step(threads: int) -> None:
    source, plan = ArraySource((np.arange(20, dtype=np.float32),)), BatchPlan(20, 6, seed=1)
    place = Placement(0, 1, 2)

    def second(steps: int, first: int = 0) -> list[Any]:
        found = batches_of(source, plan, place, steps, first, threads)
        return [s.data[1][0].numpy().tolist() for s in found]

    whole = second(9)
    for first in range(9):
        assert second(9 - first, first) == whole[first:]


def test_nests_of_all_types_are_passed_on() -> None:
    rows = np.arange(6)
    data = (
        {
            "b": rows.astype(np.uint8).reshape(6, 1),
            "a": [rows.astype(np.float16), rows % 2 == 0],
            "text": np.array(["é", "b", "c", "d", "e", ""]),
        },
        rows.astype(np.int64),
        rows.astype(np.float64),
    )
    (batch,) = batches_of(ArraySource(data), BatchPlan(6, 6), ALONE, 1)
    x, y, weight = batch.data[0]
    assert list(x) == ["b", "a", "text"]
    assert x["b"].dtype == tf.uint8
    assert x["b"].shape == (6, 1)
    assert x["a"][0].dtype == tf.float16
    assert x["a"][1].numpy().tolist() == [True, False] * 3
    assert x["text"][0].numpy().decode() == "é"
    assert y.dtype == tf.int64
    assert weight.dtype == tf.float32
    assert weight.numpy().tolist() == rows.tolist()


def test_a_tensor_is_the_memory_of_its_array() -> None:
    array = empty((4, 3), "float32")
    array[:] = 1
    tensor = as_tensor(array)
    array[0, 0] = 5
    # The tensor shares the memory of the array, so nothing was copied.
    assert float(tensor[0, 0]) == 5
    elsewhere = np.ones(13, np.float32)[1:]
    # This memory is not aligned, so the tensor is a copy.
    assert as_tensor(elsewhere).numpy().tolist() == [1] * 12


def test_an_evaluation_begins_where_the_last_one_ended() -> None:
    source = ArraySource((np.arange(10, dtype=np.float32),))
    feed = make_feed(DataArguments(source, batch_size=4), ALONE)
    for _ in range(3):
        reader = feed.reader
        queue = feed.take(0, 3)
        assert [queue.take().data[0][0].numpy()[0] for _ in range(3)] == [0, 4, 8]
        assert reader in (None, feed.reader)
    feed.take(0, 1).take()
    # The pass ends early, and the next one begins at the start.
    assert feed.take(0, 1).take().data[0][0].numpy()[0] == 0
    feed.close()


class Broken(ArraySource):
    """A source that cannot read example 7."""

    def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
        if 7 in indices:
            raise OSError(5, "Input/output error")
        super().read_into(indices, epoch, out)

    def where(self, index: int) -> str:
        return f"some.file, record {index}"


@pytest.mark.parametrize("threads", [0, 2])
def test_an_unreadable_example_is_named_in_its_step(threads: int) -> None:
    source = Broken((np.arange(12, dtype=np.float32),))
    with contextlib.closing(
        prefetcher_of(source, BatchPlan(12, 4), ALONE, 0, ReadOptions(threads))
    ) as stream:
        assert stream.queue.take().data[0][0].numpy().tolist() == [0, 1, 2, 3]
        with pytest.raises(tf.errors.OpError):
            stream.queue.take()
        assert isinstance(stream.error, DataError)
        assert str(stream.error).startswith("some.file, record 7: Input/output error. Repair")

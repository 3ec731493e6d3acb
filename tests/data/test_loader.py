"""Tests the loader: rows are read once and in order, bad ones are named or left out."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest

from tests.support.sources import LIMIT_S, Counting, Gated, WorkerReplicas
from tfmulti.config.reading import NEXT_STEP, ReadOptions
from tfmulti.data import loader
from tfmulti.data.arrays import ArraySource
from tfmulti.data.bad_records import reason_of
from tfmulti.data.batch_plan import BatchPlan
from tfmulti.data.buffers import ALIGNMENT, empty
from tfmulti.data.loader import AHEAD, Batch, Loader, cores
from tfmulti.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert not [t for t in threading.enumerate() if t not in before]


def batches(
    source: ArraySource,
    plan: BatchPlan,
    replicas: WorkerReplicas,
    count: int,
    reading: ReadOptions,
    first: int = 0,
) -> list[Batch]:
    with contextlib.closing(Loader(source, plan, replicas, reading).batches(first)) as stream:
        return list(itertools.islice(stream, count))


def own_rows_of(batch: Batch) -> list[int]:
    """Returns the rows of a worker's part that count."""
    pairs = zip(batch.data, batch.own_rows, strict=True)
    return [int(v) for (x,), rows in pairs for v in x[:rows]]


@pytest.mark.parametrize("threads", [None, 0, 1, 3])
@pytest.mark.parametrize(("workers", "local"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_each_worker_reads_its_own_rows_alone(
    workers: int, local: int, threads: int | None
) -> None:
    # The batches have 8, 8, 8 and 2 rows.
    plan = BatchPlan(26, 8, seed=5)
    sources = [Counting(26) for _ in range(workers)]
    parts = [
        batches(source, plan, WorkerReplicas(rank, workers, local), 4, ReadOptions(threads))
        for rank, source in enumerate(sources)
    ]
    for step in range(4):
        together = [v for worker in parts for v in own_rows_of(worker[step])]
        assert together == plan.examples_at(0, 8 * step, min(26, 8 * step + 8)).tolist()
    # With threads, the next batches are being read already.
    if threads == 0:
        idle = max(0, workers * local - 2)
        assert sum(sum(s.read_rows.values()) for s in sources) == 26 + idle
        assert all(len(set(s.read_rows)) <= -(-26 // workers) + 2 for s in sources)


@pytest.mark.parametrize("threads", [0, 3])
def test_reading_starts_at_any_step(threads: int) -> None:
    plan, replicas = BatchPlan(20, 6, seed=1), WorkerReplicas(0, 1, 2)
    all_rows = [
        own_rows_of(b) for b in batches(Counting(20), plan, replicas, 9, ReadOptions(threads))
    ]
    for first in range(9):
        rest = batches(Counting(20), plan, replicas, 9 - first, ReadOptions(threads), first)
        assert [own_rows_of(b) for b in rest] == all_rows[first:]


def test_read_ahead_is_limited() -> None:
    source = Counting(1000)
    stream = Loader(source, BatchPlan(1000, 10), WorkerReplicas(), ReadOptions(2)).batches()
    with contextlib.closing(stream):
        for taken in range(1, 6):
            next(stream)
            assert sum(source.read_rows.values()) <= 10 * (taken + AHEAD)


@pytest.mark.parametrize(("threads", "in_work"), [(None, 1), (0, 1), (2, 2)])
def test_stop_cancels_pieces_that_were_not_begun(threads: int | None, in_work: int) -> None:
    source, ended = Gated(64), list[type]()
    reader = Loader(source, BatchPlan(64, 16), WorkerReplicas(0, 1, 2), ReadOptions(threads))

    def read() -> None:
        try:
            with contextlib.closing(reader.batches()) as stream:
                list(itertools.islice(stream, 9))
        except CancelledError:
            ended.append(CancelledError)

    thread = threading.Thread(target=read)
    thread.start()
    source.wait_for(in_work)
    reader.stop()
    source.go.set()
    thread.join(LIMIT_S)
    assert ended == [CancelledError]
    assert len(source.calls) == in_work


def test_all_threads_work_on_one_batch() -> None:
    source = Counting(64)
    batches(source, BatchPlan(64, 64), WorkerReplicas(), 1, ReadOptions(2))
    assert source.calls[:8] == [8] * 8
    source = Counting(64)
    batches(source, BatchPlan(64, 64), WorkerReplicas(0, 1, 4), 1, ReadOptions(2))
    # More replicas do not lead to more pieces.
    assert source.calls[:8] == [8] * 8


@pytest.mark.parametrize(("seconds", "threads"), [(1e-6, 0), (1e-3, 2)])
def test_threads_are_used_if_reading_is_slow(
    seconds: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def clock() -> float:
        # Each piece seems to take this long.
        now[0] += seconds
        return now[0]

    monkeypatch.setattr(loader.time, "perf_counter", clock)
    monkeypatch.setattr(loader, "cores", lambda: 2)
    reader = Loader(Counting(64), BatchPlan(64, 64), WorkerReplicas(), ReadOptions())
    assert reader.threads is None
    with contextlib.closing(reader.batches()) as stream:
        assert own_rows_of(next(stream)) == list(range(64))
    assert reader.threads == threads


def test_cores_are_shared_by_the_workers_of_a_machine() -> None:
    alone = cores({})
    assert alone >= 1
    assert cores({"LOCAL_WORLD_SIZE": str(alone)}) == 1
    assert cores({"LOCAL_WORLD_SIZE": "x"}) == alone


@pytest.mark.parametrize("threads", [0, 2])
def test_the_first_bad_example_is_named(threads: int) -> None:
    source = Counting(12, bad=(7,))
    reader = Loader(source, BatchPlan(12, 4), WorkerReplicas(), ReadOptions(threads))
    with contextlib.closing(reader.batches()) as stream:
        assert own_rows_of(next(stream)) == [0, 1, 2, 3]
        with pytest.raises(
            DataError, match=r"file, record 7: Input/output error\. Repair or remove"
        ):
            next(stream)


@pytest.mark.parametrize("threads", [0, 2])
def test_bad_examples_are_left_out_up_to_the_limit(threads: int) -> None:
    source = Counting(12, bad=(5, 6))
    first, second, third = batches(
        source, BatchPlan(12, 4), WorkerReplicas(), 3, ReadOptions(threads, 2)
    )
    assert (own_rows_of(first), own_rows_of(second), own_rows_of(third)) == (
        [0, 1, 2, 3],
        [4, 7],
        [8, 9, 10, 11],
    )
    assert (first.lost, second.rows, second.own_rows) == ((), 2, (2,))
    assert second.lost == tuple(f"file, record {i}: Input/output error." for i in (5, 6))


@pytest.mark.parametrize("threads", [0, 2])
def test_the_row_of_a_bad_example_is_zeros_with_several_workers(threads: int) -> None:
    """So the step can run, which tells the other workers."""
    source = Counting(12, bad=(1, 4))
    (batch,) = batches(source, BatchPlan(12, 12), WorkerReplicas(0, 2, 2), 1, ReadOptions(threads))
    assert [x.tolist() for (x,) in batch.data] == [[0, 0, 2], [3, 0, 5]]
    assert (batch.rows, batch.own_rows, batch.first_rows) == (12, (3, 3), (0, 3))
    assert batch.lost == tuple(f"file, record {i}: Input/output error. {NEXT_STEP}" for i in (1, 4))


def test_the_advice_depends_on_whether_each_example_is_needed() -> None:
    for reading, message in (
        (ReadOptions(0), "or give --skip"),
        (ReadOptions(keeps_each=True), "a row for"),
    ):
        with pytest.raises(DataError, match=rf"record 1: Input/output error\. Repair .* {message}"):
            batches(Counting(12, bad=(1,)), BatchPlan(12, 12), WorkerReplicas(), 1, reading)


def test_left_out_rows_move_the_positions_of_the_others() -> None:
    """4 replicas of 3 rows: lost rows move the positions of the others, as on one device."""
    source = Counting(12, bad=(1, 3, 4, 5))
    (batch,) = batches(source, BatchPlan(12, 12), WorkerReplicas(0, 1, 4), 1, ReadOptions(0, 9))
    assert batch.own_rows == (2, 0, 3, 3)
    assert batch.first_rows == (0, 2, 2, 5)
    assert batch.rows == 8
    # A replica without a good row reads one good example.
    assert [len(x) for (x,) in batch.data] == [2, 1, 3, 3]


def test_losses_of_other_workers_are_not_known() -> None:
    source = Counting(12, bad=(1,))
    (batch,) = batches(source, BatchPlan(12, 12), WorkerReplicas(0, 2, 1), 1, ReadOptions(0, 9))
    assert (batch.rows, batch.own_rows, batch.first_rows) == (12, (5,), (0,))


def test_a_bad_row_of_a_replica_without_rows_is_not_counted() -> None:
    """3 rows on 2 workers × 2: the fourth replica reads the third's row, which counts once."""
    source = Counting(3, bad=(2,))
    (batch,) = batches(source, BatchPlan(3, 3), WorkerReplicas(1, 2, 2), 1, ReadOptions(0, 9))
    assert batch.own_rows == (0, 0)
    assert len(batch.lost) == 1
    assert [x.tolist() for (x,) in batch.data] == [[0], [0]]


def test_data_without_a_readable_example_is_an_error() -> None:
    source = Counting(4, bad=(0, 1, 2, 3))
    with pytest.raises(DataError, match="none of the first 4 examples can be read"):
        batches(source, BatchPlan(4, 2), WorkerReplicas(), 1, ReadOptions(0, 9))


def test_a_piece_that_fails_once_is_read_again() -> None:
    class Once(Counting):
        def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
            if len(indices) > 1:
                raise OSError(110, "Connection timed out")
            super().read_into(indices, epoch, out)

    (batch,) = batches(Once(6), BatchPlan(6, 6), WorkerReplicas(), 1, ReadOptions(0))
    assert own_rows_of(batch) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["threads", "skip_bad_records"])
def test_reading_takes_no_negative_numbers(name: str) -> None:
    with pytest.raises(ConfigError, match="is -1, but it must be at least 0"):
        ReadOptions(**{name: -1})


def test_memory_is_aligned_for_tensorflow() -> None:
    for shape in ((1,), (3, 5), (7, 0, 2), (100, 3)):
        array = empty(shape, "float32")
        assert array.shape == shape
        assert array.ctypes.data % ALIGNMENT == 0 or not array.size
        assert array.flags.c_contiguous


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(2, "No such file or directory"), "No such file or directory."),
        (ValueError("it is\nno image."), "it is no image."),
        (KeyError(), "KeyError."),
    ],
)
def test_a_reason_is_one_sentence(error: Exception, message: str) -> None:
    assert reason_of(error) == message

"""The reader: every part read once and in order, bad examples named or left out, threads ended."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tfmulti.config.reading import ReadOptions
from tfmulti.data import loader
from tfmulti.data.arrays import ArraySource
from tfmulti.data.bad_records import reason_of
from tfmulti.data.batch_plan import BatchPlan
from tfmulti.data.buffers import ALIGNMENT, empty
from tfmulti.data.loader import AHEAD, Batch, Loader, cores
from tfmulti.errors import ConfigError, DataError


@dataclass(frozen=True)
class Place:
    rank: int = 0
    workers: int = 1
    local_replicas: int = 1

    @property
    def first_replica(self) -> int:
        return self.rank * self.local_replicas

    @property
    def replicas(self) -> int:
        return self.workers * self.local_replicas


class Counting(ArraySource):
    """Numbers 0 … n-1; counts how often each was read, and cannot read some."""

    def __init__(self, rows: int, bad: tuple[int, ...] = ()) -> None:
        super().__init__((np.arange(rows, dtype=np.int64),))
        self.read_rows: Counter[int] = Counter()
        self.calls: list[int] = []
        self.bad = bad
        self._lock = threading.Lock()

    def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
        if set(self.bad) & set(indices.tolist()):
            raise OSError(5, "Input/output error")
        with self._lock:
            self.read_rows.update(indices.tolist())
            self.calls.append(len(indices))
        super().read_into(indices, epoch, out)

    def read(self, indices: Any, epoch: int = 0) -> Any:
        if set(self.bad) & set(np.asarray(indices).tolist()):
            raise OSError(5, "Input/output error")
        return super().read(indices, epoch)

    def where(self, index: int) -> str:
        return f"file, record {index}"


class Gated(Counting):
    """Each of its reads releases `begun`, and waits for `go`."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.begun, self.go = threading.Semaphore(0), threading.Event()

    def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
        self.begun.release()
        self.go.wait(LIMIT_S)
        self.go.set()
        super().read_into(indices, epoch, out)

    def wait_for(self, reads: int) -> None:
        """Waits until so many reads have begun."""
        assert all(self.begun.acquire(timeout=LIMIT_S) for _ in range(reads))


# Only a test that fails waits for so long.
LIMIT_S = 20


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert not [t for t in threading.enumerate() if t not in before]


def batches(
    source: ArraySource,
    plan: BatchPlan,
    place: Place,
    count: int,
    reading: ReadOptions,
    first: int = 0,
) -> list[Batch]:
    with contextlib.closing(Loader(source, plan, place, reading).batches(first)) as found:
        return list(itertools.islice(found, count))


def own(batch: Batch) -> list[int]:
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
        batches(source, plan, Place(rank, workers, local), 4, ReadOptions(threads))
        for rank, source in enumerate(sources)
    ]
    for step in range(4):
        together = [v for worker in parts for v in own(worker[step])]
        assert together == plan.examples_at(0, 8 * step, min(26, 8 * step + 8)).tolist()
    # With threads, the next batches are being read already.
    if threads == 0:
        idle = max(0, workers * local - 2)
        assert sum(sum(s.read_rows.values()) for s in sources) == 26 + idle
        assert all(len(set(s.read_rows)) <= -(-26 // workers) + 2 for s in sources)


@pytest.mark.parametrize("threads", [0, 3])
def test_it_starts_at_any_step(threads: int) -> None:
    plan, place = BatchPlan(20, 6, seed=1), Place(0, 1, 2)
    whole = [own(b) for b in batches(Counting(20), plan, place, 9, ReadOptions(threads))]
    for first in range(9):
        rest = batches(Counting(20), plan, place, 9 - first, ReadOptions(threads), first)
        assert [own(b) for b in rest] == whole[first:]


def test_no_more_is_read_ahead_than_is_stated() -> None:
    source = Counting(1000)
    found = Loader(source, BatchPlan(1000, 10), Place(), ReadOptions(2)).batches()
    with contextlib.closing(found):
        for taken in range(1, 6):
            next(found)
            assert sum(source.read_rows.values()) <= 10 * (taken + AHEAD)


@pytest.mark.parametrize(("threads", "in_work"), [(None, 1), (0, 1), (2, 2)])
def test_what_was_not_begun_is_not_read_after_a_stop(threads: int | None, in_work: int) -> None:
    source, ended = Gated(64), list[type]()
    made = Loader(source, BatchPlan(64, 16), Place(0, 1, 2), ReadOptions(threads))

    def read() -> None:
        try:
            with contextlib.closing(made.batches()) as found:
                list(itertools.islice(found, 9))
        except CancelledError:
            ended.append(CancelledError)

    thread = threading.Thread(target=read)
    thread.start()
    source.wait_for(in_work)
    made.stop()
    source.go.set()
    thread.join(LIMIT_S)
    assert ended == [CancelledError]
    assert len(source.calls) == in_work


def test_all_threads_work_on_one_batch() -> None:
    source = Counting(64)
    batches(source, BatchPlan(64, 64), Place(), 1, ReadOptions(2))
    assert source.calls[:8] == [8] * 8
    source = Counting(64)
    batches(source, BatchPlan(64, 64), Place(0, 1, 4), 1, ReadOptions(2))
    # More replicas do not lead to more pieces.
    assert source.calls[:8] == [8] * 8


@pytest.mark.parametrize(("seconds", "threads"), [(1e-6, 0), (1e-3, 2)])
def test_threads_are_used_where_reading_is_slow(
    seconds: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def clock() -> float:
        # Each piece seems to take this long.
        now[0] += seconds
        return now[0]

    monkeypatch.setattr(loader.time, "perf_counter", clock)
    monkeypatch.setattr(loader, "cores", lambda: 2)
    made = Loader(Counting(64), BatchPlan(64, 64), Place(), ReadOptions())
    assert made.threads is None
    with contextlib.closing(made.batches()) as found:
        assert own(next(found)) == list(range(64))
    assert made.threads == threads


def test_cores_are_shared_by_the_workers_of_a_machine() -> None:
    alone = cores({})
    assert alone >= 1
    assert cores({"LOCAL_WORLD_SIZE": str(alone)}) == 1
    assert cores({"LOCAL_WORLD_SIZE": "x"}) == alone


@pytest.mark.parametrize("threads", [0, 2])
def test_the_first_bad_example_is_named(threads: int) -> None:
    source = Counting(12, bad=(7,))
    made = Loader(source, BatchPlan(12, 4), Place(), ReadOptions(threads))
    with contextlib.closing(made.batches()) as found:
        assert own(next(found)) == [0, 1, 2, 3]
        with pytest.raises(
            DataError, match=r"file, record 7: Input/output error\. Repair or remove"
        ):
            next(found)


@pytest.mark.parametrize("threads", [0, 2])
def test_bad_examples_are_left_out_where_that_is_asked_for(threads: int) -> None:
    source = Counting(12, bad=(5, 6))
    first, second, third = batches(source, BatchPlan(12, 4), Place(), 3, ReadOptions(threads, 2))
    assert (own(first), own(second), own(third)) == ([0, 1, 2, 3], [4, 7], [8, 9, 10, 11])
    assert (first.lost, second.rows, second.own_rows) == ((), 2, (2,))
    assert second.lost == tuple(f"file, record {i}: Input/output error." for i in (5, 6))


@pytest.mark.parametrize("threads", [0, 2])
def test_other_workers_are_told_of_a_bad_example(threads: int) -> None:
    """Its row is zeros, so that the step, which tells them, can be run."""
    source = Counting(12, bad=(1, 4))
    (batch,) = batches(source, BatchPlan(12, 12), Place(0, 2, 2), 1, ReadOptions(threads))
    assert [x.tolist() for (x,) in batch.data] == [[0, 0, 2], [3, 0, 5]]
    assert (batch.rows, batch.own_rows, batch.first_rows) == (12, (3, 3), (0, 3))
    assert batch.lost == tuple(f"file, record {i}: Input/output error." for i in (1, 4))


def test_the_next_step_goes_with_how_it_is_read() -> None:
    for reading, words in (
        (ReadOptions(0), "or give --skip"),
        (ReadOptions(keeps_each=True), "a row for"),
    ):
        with pytest.raises(DataError, match=rf"record 1: Input/output error\. Repair .* {words}"):
            batches(Counting(12, bad=(1,)), BatchPlan(12, 12), Place(), 1, reading)


def test_rows_close_up_where_some_are_left_out() -> None:
    """4 replicas of 3 rows: lost rows move the positions of the others, as on one device."""
    source = Counting(12, bad=(1, 3, 4, 5))
    (batch,) = batches(source, BatchPlan(12, 12), Place(0, 1, 4), 1, ReadOptions(0, 9))
    assert batch.own_rows == (2, 0, 3, 3)
    assert batch.first_rows == (0, 2, 2, 5)
    assert batch.rows == 8
    # A replica without a good row reads one good example.
    assert [len(x) for (x,) in batch.data] == [2, 1, 3, 3]


def test_what_others_lost_is_not_known_here() -> None:
    source = Counting(12, bad=(1,))
    (batch,) = batches(source, BatchPlan(12, 12), Place(0, 2, 1), 1, ReadOptions(0, 9))
    assert (batch.rows, batch.own_rows, batch.first_rows) == (12, (5,), (0,))


def test_what_a_replica_without_rows_cannot_read_is_not_counted() -> None:
    """3 rows on 2 workers × 2: the fourth replica reads the third's row, which counts once."""
    source = Counting(3, bad=(2,))
    (batch,) = batches(source, BatchPlan(3, 3), Place(1, 2, 2), 1, ReadOptions(0, 9))
    assert batch.own_rows == (0, 0)
    assert len(batch.lost) == 1
    assert [x.tolist() for (x,) in batch.data] == [[0], [0]]


def test_nothing_that_can_be_read() -> None:
    source = Counting(4, bad=(0, 1, 2, 3))
    with pytest.raises(DataError, match="none of the first 4 examples can be read"):
        batches(source, BatchPlan(4, 2), Place(), 1, ReadOptions(0, 9))


def test_a_piece_that_fails_once_is_read_again() -> None:
    class Once(Counting):
        def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
            if len(indices) > 1:
                raise OSError(110, "Connection timed out")
            super().read_into(indices, epoch, out)

    (batch,) = batches(Once(6), BatchPlan(6, 6), Place(), 1, ReadOptions(0))
    assert own(batch) == [0, 1, 2, 3, 4, 5]


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
    ("error", "words"),
    [
        (OSError(2, "No such file or directory"), "No such file or directory."),
        (ValueError("it is\nno image."), "it is no image."),
        (KeyError(), "KeyError."),
    ],
)
def test_a_reason_is_one_sentence(error: Exception, words: str) -> None:
    assert reason_of(error) == words

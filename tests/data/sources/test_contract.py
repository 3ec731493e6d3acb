"""Tests every kind of data: random access, each example once, resuming at every step."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.made_data import EXAMPLES, KINDS
from tests.support.sources import WorkerReplicas
from tfmulti.config.fit_config import FitConfig
from tfmulti.config.reading import ReadOptions
from tfmulti.data.batch_plan import BatchPlan
from tfmulti.data.loader import Batch, Loader
from tfmulti.data.source import Source, leaves_of, map_nest
from tfmulti.run.validation import load_data

BATCH, EPOCHS = 5, 2
PLAN = BatchPlan(EXAMPLES, BATCH, seed=4)
STEPS = EPOCHS * PLAN.steps_per_epoch


# Every kind of data by itself, and with the transforms of a run.
CHANGED: dict[str, tuple[str, dict[str, Any]]] = {
    "cached in memory": ("images", {"cache": "memory"}),
    "cached on disk": ("tfrecord", {"cache": "disk"}),
    "augmented": ("images", {"augment": "flip,shift,crop,brightness"}),
    "a slice": ("csv", {"training_split": "train"}),
    "weighted": ("npy", {"class_weight": "balanced"}),
}
PARAMS = [*KINDS, *CHANGED]


@pytest.fixture(scope="module", params=PARAMS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Yields the training part of each kind of data, with all examples."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFMULTI_CACHE", str(folder / "cache"))
        return load(request.param, folder)


def load(name: str, folder: Path) -> Source:
    kind, options = CHANGED.get(name, (name, {}))
    (folder / "data").mkdir()
    config = FitConfig(
        dataset=KINDS[kind](folder / "data"),
        validation_fraction=0.0,
        global_batch_size=BATCH,
        **options,
    )
    data = load_data(config)
    assert data is not None
    if data.broadcast is not None:
        # One worker is the chief, so its own result is shared.
        data = data.broadcast(data, lambda make: make())
    train: Source = data.train
    return train


@pytest.fixture
def all_rows(source: Source) -> list[str]:
    """Returns the digests of all examples of two epochs, in order."""
    return rows_of(read(source, WorkerReplicas(), STEPS))


def read(
    source: Any, replicas: WorkerReplicas, steps: int, first: int = 0, threads: int = 0
) -> list[Batch]:
    reader = Loader(source, PLAN, replicas, ReadOptions(threads))
    with contextlib.closing(reader.batches(first)) as batches:
        return list(itertools.islice(batches, steps))


def rows_of(batches: list[Batch]) -> list[str]:
    """Returns a digest of each row that counts, in order."""
    return [
        digest(data, row)
        for batch in batches
        for data, count in zip(batch.data, batch.own_rows, strict=True)
        for row in range(count)
    ]


def digest(data: Any, row: int) -> str:
    hash_ = hashlib.sha256()
    for leaf in leaves_of(data):
        value = np.asarray(leaf[row])
        hash_.update(f"{value.dtype} {value.shape} {value.tolist()}".encode())
    return hash_.hexdigest()


def test_data_has_the_declared_form(source: Source) -> None:
    assert len(source) == EXAMPLES
    rows = source.read(np.array([3, 1]))

    def check(leaf: Any, values: Any) -> None:
        array = np.asarray(values)
        assert array.shape == (2, *leaf.shape)
        assert (array.dtype.kind in "OSU") if leaf.dtype == "str" else array.dtype == leaf.dtype

    map_nest(check, source.specs, rows)


def test_examples_are_read_at_random(source: Source) -> None:
    everything = source.read(np.arange(EXAMPLES))
    each = [digest(everything, row) for row in range(EXAMPLES)]
    # The other tests identify examples by their digests.
    assert len(set(each)) == EXAMPLES
    some = np.array([EXAMPLES - 1, 0, 7, 7])
    again = source.read(some)
    assert [digest(again, row) for row in range(4)] == [each[i] for i in some]
    (batch,) = read(source, WorkerReplicas(), 1)
    assert rows_of([batch]) == [each[i] for i in PLAN.examples_at(0, 0, BATCH)]


def test_each_epoch_has_each_example_once(
    all_rows: list[str], request: pytest.FixtureRequest
) -> None:
    first, second = all_rows[:EXAMPLES], all_rows[EXAMPLES:]
    assert set(Counter(first).values()) == {1}
    assert first != second
    if request.node.callspec.params["source"] == "augmented":
        # Each epoch augments the examples in another way.
        assert not set(first) & set(second)
    else:
        assert sorted(first) == sorted(second)


@pytest.mark.parametrize("threads", [0, 3])
def test_reading_resumes_at_every_step(source: Source, all_rows: list[str], threads: int) -> None:
    sizes = [0, *(len(b.data[0][1]) for b in read(source, WorkerReplicas(), STEPS))]
    starts = list(itertools.accumulate(sizes))
    for step in range(STEPS):
        rest = read(source, WorkerReplicas(), STEPS - step, step, threads)
        assert rows_of(rest) == all_rows[starts[step] :]


@pytest.mark.parametrize(("workers", "local"), [(2, 1), (3, 1), (2, 3), (7, 1)])
def test_workers_together_read_each_example(
    source: Source, all_rows: list[str], workers: int, local: int
) -> None:
    parts = [
        read(source, WorkerReplicas(rank, workers, local), STEPS, 0, 2) for rank in range(workers)
    ]
    together = [rows_of([worker[step]]) for step in range(STEPS) for worker in parts]
    assert list(itertools.chain(*together)) == all_rows


def test_many_threads_can_read_at_once(source: Source) -> None:
    expected = [digest(source.read(np.arange(EXAMPLES)), row) for row in range(EXAMPLES)]
    wrong: list[Any] = []

    def check(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(5):
            rows = rng.permutation(EXAMPLES)
            batch = source.read(rows)
            wrong.extend(i for k, i in enumerate(rows) if digest(batch, k) != expected[i])

    threads = [threading.Thread(target=check, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_messages_tell_examples_apart(source: Source) -> None:
    assert len({source.where(index) for index in range(EXAMPLES)}) == EXAMPLES


def test_loading_a_source_again_gives_the_same(
    source: Source, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFMULTI_CACHE", str(tmp_path / "cache"))
    again = load(request.node.callspec.params["source"], tmp_path)
    one, other = source.read(np.arange(EXAMPLES)), again.read(np.arange(EXAMPLES))
    assert [digest(one, i) for i in range(EXAMPLES)] == [digest(other, i) for i in range(EXAMPLES)]

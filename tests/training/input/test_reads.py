"""What two and three real workers read: each its part, together all of it once an epoch."""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from typing import Any

import pytest

from tests.support.forked import run, run_workers
from tests.support.processes import ONE_THREAD
from tests.support.reads import BAD, BATCH, EPOCHS, EXAMPLES
from tfmulti.data.batch_plan import BatchPlan

pytestmark = pytest.mark.multiworker


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Gives `found(workers)`: what each worker wrote down."""

    @functools.cache
    def read(workers: int) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp(f"reads-{workers}")
        argv = ["-m", "tests.support.reads", str(folder / "out_RANK.json")]
        if workers == 1:
            done = run(argv, folder / "logs", limit_s=200, env=ONE_THREAD)
            assert done.returncode == 0, done.stderr[-6000:]
        else:
            run_workers(argv, workers, folder / "logs", limit_s=200, env=ONE_THREAD)
        return [json.loads(file.read_text()) for file in sorted(folder.glob("out_*.json"))]

    return read


WORKERS = pytest.mark.parametrize("workers", [1, 2, 3])


def of_epoch(reads: list[list[int]], epoch: int) -> list[int]:
    return [example for number, example in reads if number == epoch]


@WORKERS
def test_together_they_read_each_example_once_an_epoch(found: Any, workers: int) -> None:
    plan = BatchPlan(EXAMPLES, BATCH, seed=9)
    for epoch in range(EPOCHS):
        parts = [of_epoch(worker["training"], epoch) for worker in found(workers)]
        # The last batch has 2 rows: on three workers one has none, and reads one of the others'.
        expected = Counter(range(EXAMPLES))
        expected.update(plan.examples_at(epoch, EXAMPLES - 1, EXAMPLES).tolist() * (workers == 3))
        assert Counter(itertools.chain(*parts)) == expected
        assert max(map(len, parts)) <= -(-EXAMPLES // workers) + 4


@WORKERS
def test_what_is_read_ahead_is_bounded(found: Any, workers: int) -> None:
    """In bytes, too: 20 an example; at the end of training 5 more batches are on their way."""
    for worker in found(workers):
        most = len(worker["training"])
        assert worker["bytes"] == 20 * most
        assert len(of_epoch(worker["training"], EPOCHS)) <= 5 * -(-BATCH // workers)
        assert not of_epoch(worker["training"], EPOCHS + 1)


@WORKERS
def test_validation_is_shared_out_too(found: Any, workers: int) -> None:
    """7 rows in one batch; a pass that was read ahead is the next one's, not read again."""
    parts = [of_epoch(worker["validation"], 0) for worker in found(workers)]
    assert Counter(itertools.chain(*parts)) == Counter(range(7))
    second = [of_epoch(worker["validation"], 1) for worker in found(workers)]
    assert Counter(itertools.chain(*second)) == Counter(range(7))


@WORKERS
def test_fewer_examples_than_workers(found: Any, workers: int) -> None:
    parts = [set(of_epoch(worker["few"], 0)) for worker in found(workers)]
    assert set.union(*parts) == {0, 1}
    assert all(len(part) == (2 if workers == 1 else 1) for part in parts)


@WORKERS
def test_bad_examples_are_left_out_alike(found: Any, workers: int) -> None:
    for worker in found(workers):
        _, lost, examples = worker["skipped"]
        assert lost == EPOCHS * len(BAD)
        assert examples == EPOCHS * (EXAMPLES - len(BAD))
        assert worker["too many"].startswith("3 examples of this pass over the data could not be ")
        assert "more than --skip_bad_records 2 allows" in worker["too many"]
    said = "".join(worker["said"] for worker in found(workers))
    for example in BAD:
        assert f"tfmulti: left out some.file, record {example}: Input/output error." in said
    reads = [of_epoch(worker["skipped"][0], 0) for worker in found(workers)]
    assert set(itertools.chain(*reads)) == set(range(EXAMPLES)) - set(BAD)


@WORKERS
@pytest.mark.parametrize("part", ["", " of validation", " of evaluation", " of prediction"])
def test_a_bad_example_ends_the_call_on_all_workers(found: Any, workers: int, part: str) -> None:
    """Where no example may be left out, all workers name it, although one of them read it."""
    (message,) = {worker[f"any{part}"] for worker in found(workers)}
    assert message.startswith(tuple(f"some.file, record {example}: " for example in BAD))
    predicts = part == " of prediction"
    assert ("returns a row for each" if predicts else "or give --skip_bad_records N") in message


@WORKERS
def test_the_line_about_a_storage_that_is_gone_has_one_next_step(found: Any, workers: int) -> None:
    (message,) = {worker["gone"] for worker in found(workers)}
    assert message == (
        f"some.file, record {BAD[0]}: Stale file handle. "
        "The storage failed, not a single record. Make it available again."
    )


@WORKERS
def test_data_without_bad_examples_ends_no_call(found: Any, workers: int) -> None:
    for worker in found(workers):
        assert not {"evaluation", "prediction"} & set(worker)


@WORKERS
@pytest.mark.parametrize("what", ["rows", "values", "kind"])
def test_other_data_on_a_worker_is_noticed_by_all(found: Any, workers: int, what: str) -> None:
    for worker in found(workers):
        said = worker[f"other {what}"]
        assert said is None if workers == 1 else "the workers have different data" in said


@WORKERS
def test_waiting_for_slow_data_is_seen(found: Any, workers: int) -> None:
    for worker in found(workers):
        assert worker["paused"] > 0
        # A batch is read while the step before it runs, and the first before the clock does.
        assert worker["paused"] / 4 < worker["waited"] <= 1.01 * worker["epoch"]


@WORKERS
def test_no_thread_is_left(found: Any, workers: int) -> None:
    for worker in found(workers):
        assert not [name for name in worker["left"] if name.startswith("tfmulti")]


def test_the_numbers_are_the_same_on_any_number_of_workers(found: Any) -> None:
    alone = found(1)[0]["loss"]
    for workers in (2, 3):
        for worker in found(workers):
            assert worker["loss"] == pytest.approx(alone, rel=1e-6)

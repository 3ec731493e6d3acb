"""Tests that a tf.data iterator continues at the saved position of another iterator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmulti.distribution.strategies import Placement
from tfmulti.errors import DataError
from tfmulti.training.input import positions
from tfmulti.training.input.feed import DataArguments, make_feed
from tfmulti.training.input.replay import Trial
from tfmulti.training.input.shuffle import Shuffle

pytestmark = pytest.mark.mirrored

ALONE = Placement(0, 1, 1)
Make = Callable[[], tf.data.Dataset]


def numbers() -> tf.data.Dataset:
    return tf.data.Dataset.range(100)


def random_by_seed() -> tf.data.Dataset:
    seeds = tf.data.Dataset.random(seed=3, rerandomize_each_iteration=True)
    return tf.data.Dataset.zip((numbers().repeat(), seeds)).map(
        lambda x, seed: tf.random.stateless_uniform([], [x, seed])
    )


DATASETS: dict[str, Make] = {
    "shuffled": lambda: numbers().shuffle(20, seed=1).repeat().batch(4),
    "shuffled over the ends": lambda: numbers().repeat().shuffle(20, seed=1).batch(4),
    "interleaved": lambda: (
        tf.data.Dataset.range(6)
        .interleave(lambda i: tf.data.Dataset.range(10 * i, 10 * i + 10), 3, num_parallel_calls=2)
        .repeat()
        .batch(4)
    ),
    "cached": lambda: numbers().cache().shuffle(60, seed=2).repeat().batch(4),
    "random by a seed": lambda: random_by_seed().batch(4),
    "read ahead to the ends": lambda: numbers().shuffle(60, seed=1).batch(4).prefetch(2).repeat(),
    "shuffled twice": lambda: numbers().shuffle(60, seed=1).shuffle(9, seed=2).repeat().batch(4),
}
WITHOUT_SOME = "read ahead to the ends"


def begun(feed: Any) -> Any:
    """Begins a pass, or continues one, and returns its iterator."""
    return feed.take(0, 1)


def values(iterator: Any, count: int) -> list[Any]:
    return [value_of(next(iterator)) for _ in range(count)]


def value_of(taken: Any) -> Any:
    return batch_of(taken).numpy().tolist()


def batch_of(taken: Any) -> Any:
    batch = taken.get_value() if isinstance(taken, tf.experimental.Optional) else taken
    return batch[0] if isinstance(batch, tuple) else batch


class Watched:
    """An iterator that counts its reads, and the reads of all its kind."""

    reads_of_all = 0

    def __init__(self, inner: Any) -> None:
        self.inner, self.reads = inner, 0

    def __next__(self) -> Any:
        self.reads += 1
        Watched.reads_of_all += 1
        return next(self.inner)

    def __iter__(self) -> Any:
        return self

    def get_next_as_optional(self) -> Any:
        return self.inner.get_next_as_optional()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tf.data.Dataset.__iter__
    checkpoint = tf.train.Checkpoint
    monkeypatch.setattr(tf.train, "Checkpoint", lambda iterator: checkpoint(it=iterator.inner))
    monkeypatch.setattr(tf.data.Dataset, "__iter__", lambda self: Watched(real(self)))


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("name", list(DATASETS))
def test_a_dataset_resumes_at_once_from_every_batch(name: str) -> None:
    """If the position lacks the state of an ended shuffle, the pass is read from its start."""
    whole = values(begun(make_feed(DataArguments(DATASETS[name]()), ALONE)), 50)
    at_once = 0
    for batches in (1, 3, 5, 6, 7, 8, 9, 12, 24, 25, 26):
        feed = make_feed(DataArguments(DATASETS[name]()), ALONE)
        values(begun(feed), batches)
        state = feed.get_state(batches)
        again = make_feed(DataArguments(DATASETS[name]()), ALONE)
        again.set_state(state, batches)
        iterator = begun(again)
        at_once += iterator.reads == 0
        assert iterator.reads in (0, batches)
        assert values(iterator, 50 - batches) == whole[batches:]
    assert at_once >= (9 if name == WITHOUT_SOME else 11)


def _generator() -> Iterator[np.ndarray]:
    yield from np.arange(40.0).reshape(10, 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.data.Dataset.from_generator(
            _generator, output_signature=tf.TensorSpec([4], tf.float64)
        ).repeat(),
        lambda: (
            numbers()
            .map(lambda x: tf.random.uniform([]) * tf.cast(x, tf.float32))
            .repeat()
            .batch(4)
        ),
        lambda: tf.data.Dataset.from_generator(
            _generator, output_signature=tf.TensorSpec([4], tf.float64)
        ),
        lambda: numbers().map(lambda x: tf.random.uniform([]) * tf.cast(x, tf.float32)).batch(4),
    ],
)
def test_data_without_a_position_is_read_again(make: Make) -> None:
    feed = make_feed(DataArguments(make()), ALONE)
    values(begun(feed), 3)
    assert "iterator" not in feed.get_state(3)


ENDING: dict[str, Make] = {
    "shuffled": lambda: numbers().shuffle(60, seed=1).batch(8),
    "shuffled in part": lambda: numbers().shuffle(9, seed=1).batch(8).prefetch(3),
    "always the same": lambda: (
        numbers().shuffle(60, seed=1, reshuffle_each_iteration=False).batch(8)
    ),
    "of unknown length": lambda: numbers().shuffle(60, seed=1).filter(lambda x: x % 7 > 0).batch(8),
    "cached": lambda: numbers().cache().shuffle(60, seed=2).batch(8),
    "shuffled, then cached": lambda: numbers().shuffle(60, seed=2).cache().batch(8),
    "read ahead": lambda: (
        numbers()
        .shuffle(60, seed=1)
        .map(lambda x: x + 1, num_parallel_calls=2)
        .batch(8)
        .prefetch(4)
    ),
    "not shuffled": lambda: numbers().map(lambda x: x + 1, num_parallel_calls=2).batch(8),
    "twice": lambda: numbers().shuffle(30, seed=1).repeat(2).batch(16),
    "one after the other": lambda: (
        numbers().shuffle(60, seed=1).concatenate(numbers().shuffle(60, seed=2)).batch(16)
    ),
    "side by side": lambda: (
        tf.data.Dataset.zip(numbers().shuffle(60, seed=1), numbers().shuffle(60, seed=2))
        .map(lambda a, b: a * 100 + b)
        .batch(8)
    ),
    "shuffled twice": lambda: numbers().shuffle(60, seed=1).shuffle(9, seed=2).batch(8),
    "sampled": lambda: tf.data.Dataset.sample_from_datasets(
        [numbers().shuffle(60, seed=1), numbers().shuffle(9, seed=2)], [0.6, 0.4], seed=3
    ).batch(16),
    "chosen": lambda: tf.data.Dataset.choose_from_datasets(
        [numbers(), tf.data.Dataset.range(9)], numbers().map(lambda x: x % 2)
    ).batch(8),
    "drawn by a seed": lambda: (
        tf.data.Dataset.zip(numbers(), tf.data.Dataset.random(3, rerandomize_each_iteration=True))
        .map(lambda x, seed: tf.random.stateless_uniform([], [x, seed]))
        .batch(8)
    ),
    "from files": lambda: (
        tf.data.Dataset.range(6)
        .interleave(lambda i: tf.data.Dataset.range(10 * i, 10 * i + 10), 3)
        .shuffle(9, seed=1)
        .batch(8)
    ),
    "drawn without a function of a seed": lambda: (
        numbers().map(lambda x: tf.random.uniform([], seed=2) + tf.cast(x, tf.float32)).batch(8)
    ),
}
AT_EVERY_BATCH = ("shuffled in part", "not shuffled", "from files", "shuffled", "shuffled twice")
MUST_BE_READ = (
    "twice",
    "shuffled twice",
    "sampled",
    "one after the other",
    "shuffled, then cached",
)
NEVER_AT_ONCE = ("shuffled, then cached", "drawn without a function of a seed")
PASSES = 3


def passes_of(make: Make) -> list[list[Any]]:
    """Returns the batches of each pass, by the iterators that Keras makes."""
    tf.random.set_seed(5)
    dataset = make()
    passes = []
    for _ in range(PASSES):
        passes.append([batch.numpy().tolist() for batch in dataset])
        if int(dataset.cardinality()) > 0:
            # Keras makes this iterator, and reads nothing from it.
            iter(dataset)
    return passes


def rest_of_pass(feed: Any) -> list[Any]:
    return list(map(value_of, iter(lambda: feed.take(0, None), None)))


def new_feed(make: Make) -> Any:
    tf.random.set_seed(5)
    return make_feed(DataArguments(make()), ALONE)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("name", list(ENDING))
def test_finite_data_resumes_from_every_batch(name: str) -> None:
    """The later passes are also those of a run without a stop."""
    whole = passes_of(ENDING[name])
    last = len(whole[1])
    reads = []
    for batches in range(last + 1) if name in AT_EVERY_BATCH else (0, 1, 2, last - 1, last):
        feed = new_feed(ENDING[name])
        assert rest_of_pass(feed) == whole[0]
        feed.end_pass(complete=True)
        iterator = begun(feed)
        assert values(iterator, batches) == whole[1][:batches]
        state = feed.get_state(batches)

        again = new_feed(ENDING[name])
        again.set_state(state, batches)
        iterator = begun(again)
        reads.append(0 if iterator is None else iterator.reads)
        assert reads[-1] in (0, batches)
        # As long as the iterator exists, TensorFlow continues its sequence of random numbers.
        del iterator
        assert rest_of_pass(again) == whole[1][batches:]
        again.end_pass(complete=True)
        for number in range(2, PASSES):
            assert rest_of_pass(again) == whole[number]
            again.end_pass(complete=True)
    if name == "not shuffled":
        assert not any(reads)
    elif name not in (*NEVER_AT_ONCE, "one after the other"):
        assert reads[1:3] == [0, 0]


def test_a_position_of_an_older_version_is_resumed() -> None:
    """Its position is of another kind, which is not used, or of an earlier batch."""
    whole = passes_of(ENDING["shuffled"])
    feed = new_feed(ENDING["shuffled"])
    rest_of_pass(feed)
    feed.end_pass(complete=True)
    values(begun(feed), 2)
    state = feed.get_state(2)
    of_all_passes = positions.position_of(iter(numbers().batch(8).repeat()))
    for change in ({}, {"form": "of all passes", "iterator": of_all_passes, "lacks_seeds": True}):
        again = new_feed(ENDING["shuffled"])
        again.set_state(state | change, 5)
        assert values(begun(again), 3) == whole[1][5:8]


@pytest.mark.parametrize("name", ["shuffled", "shuffled twice", "side by side", "drawn by a seed"])
def test_the_state_of_each_part_that_draws_is_in_a_complete_position(name: str) -> None:
    options = tf.data.Options()
    # The autotuner would read ahead, up to the end.
    options.autotune.enabled = False
    dataset = ENDING[name]().with_options(options)
    iterator = iter(dataset)
    next(iterator)
    position = positions.position_of(iterator)
    assert position is not None
    assert positions.is_complete(position, dataset)
    assert not positions.is_complete(position, tf.data.Dataset.zip(dataset, numbers().shuffle(2)))


def test_texts_of_the_data_are_not_counted_as_states() -> None:
    """The rows of a shuffle's buffer are in the same files as the state of its generator."""
    words = "Iterator::Root::Shuffle@@epoch_num_random_samples@@num_random_samples "
    dataset = tf.data.Dataset.from_tensor_slices(tf.constant([words] * 8)).shuffle(8, seed=1)
    iterator = iter(dataset)
    next(iterator)
    position = positions.position_of(iterator)
    assert position is not None
    assert positions.is_complete(position, dataset)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("name", list(ENDING))
@pytest.mark.parametrize("known", [True, False])
def test_finite_data_resumes_between_two_passes(name: str, known: bool) -> None:
    """The run stops in the evaluation after a pass, whose end no read may have shown."""
    whole = passes_of(ENDING[name])
    last = len(whole[1])
    feed = new_feed(ENDING[name])
    for done in range(2):
        iterator = begun(feed)
        if known:
            values(iterator, len(whole[done]))
        else:
            rest_of_pass(feed)
        state = feed.get_state(last)
        feed.end_pass(complete=True)

    again = new_feed(ENDING[name])
    before = Watched.reads_of_all
    again.set_state(state, last)
    is_told = not known or again.data.steps is not None
    assert Watched.reads_of_all == before or name in MUST_BE_READ or not is_told
    assert again.take(0, None) is None
    again.end_pass(complete=True)
    assert rest_of_pass(again) == whole[2]

    # The second feed begins after the evaluation.
    again = new_feed(ENDING[name])
    again.set_state(feed.get_state(0))
    assert rest_of_pass(again) == whole[2]


PLACES = [Placement(0, 1, 1), Placement(0, 1, 2), Placement(1, 2, 1), Placement(2, 3, 2)]


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_a_position_is_valid_on_any_number_of_workers(place: Placement, ends: bool) -> None:
    """Iterators give global batches, so the chief's position is valid on any number of workers."""

    def make() -> tf.data.Dataset:
        dataset = numbers().shuffle(20, seed=1)
        return (dataset if ends else dataset.repeat()).batch(6)

    def rest(feed: Any, batches: int) -> tuple[list[Any], int]:
        iterator = begun(feed)
        return values(iterator, 16 - batches), iterator.reads - (16 - batches)

    whole, _ = rest(make_feed(DataArguments(make()), place), 0)
    chief = make_feed(DataArguments(make()), Placement(0, 2, 1))
    iterator = begun(chief)
    for batches in range(1, 16):
        values(iterator, 1)
        again = make_feed(DataArguments(make()), place)
        again.set_state(chief.get_state(batches), batches)
        values_read, reads = rest(again, batches)
        assert values_read == whole[batches:]
        assert reads == 0 or (ends and reads == batches)


@pytest.mark.parametrize("name", ["shuffled", "of unknown length"])
def test_an_abandoned_pass_is_not_continued(name: str) -> None:
    dataset = ENDING[name]()
    iterator = iter(dataset)
    next(iterator)
    expected = [batch.numpy().tolist() for batch in dataset]
    feed = make_feed(DataArguments(ENDING[name]()), ALONE)
    next(begun(feed))
    feed.end_pass()
    assert "iterator" not in feed.get_state(1)
    assert rest_of_pass(feed) == expected


def test_a_position_is_not_ahead_of_the_steps() -> None:
    """`verify` takes the first batches together, and the steps get them again one by one."""
    feed = new_feed(ENDING["shuffled"])
    Trial(feed, 2, 2, is_long_enough=True)
    for batches in (1, 2):
        feed.take(0, 1)
        assert ("iterator" in feed.get_state(batches)) == (batches == 2)


def test_a_position_of_another_dataset_is_not_used() -> None:
    feed = new_feed(lambda: numbers().shuffle(60, seed=1).repeat().batch(4))
    values(begun(feed), 5)
    state = feed.get_state(5)
    assert state["iterator"]
    other = make_feed(DataArguments(tf.data.Dataset.range(60).skip(4).batch(4)), ALONE)
    other.set_state(state, 2)
    assert values(begun(other), 1) == [[12, 13, 14, 15]]


def test_a_position_that_is_too_large_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = new_feed(lambda: numbers().repeat().batch(4))
    values(begun(feed), 5)
    monkeypatch.setattr(positions, "MOST_BYTES", 100)
    assert "iterator" not in feed.get_state(5)
    monkeypatch.undo()
    # The feed does not try to save a position again.
    assert "iterator" not in feed.get_state(5)


class Batches(keras.utils.PyDataset):
    """Has ten batches, and records which of them were read."""

    def __init__(self, workers: int = 1) -> None:
        super().__init__(workers=workers)
        self.read: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return np.full(3, index)


def rest_of(iterator: Any) -> list[Any]:
    return list(map(value_of, iterator))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("shuffle", [None, Shuffle(4)])
def test_a_pydataset_resumes_without_reading_earlier_batches(
    shuffle: Shuffle | None, workers: int
) -> None:
    """Reader threads hold batches that no step has taken. These batches must not appear later."""
    feed = make_feed(DataArguments(Batches(workers), shuffle=shuffle), ALONE, method="fit")
    whole = []
    for _ in range(4):
        whole.append(rest_of(begun(feed)))
        feed.end_pass(complete=True)
    inner = Batches(workers)
    again = make_feed(DataArguments(inner, shuffle=shuffle), ALONE, method="fit")
    inner.read.clear()
    again.set_state({"passes": 1}, 7)
    assert rest_of(begun(again)) == whole[1][7:]
    assert sorted(inner.read) == sorted(first for first, *_ in whole[1][7:])
    again.end_pass(complete=True)
    for expected in whole[2:]:
        assert rest_of(begun(again)) == expected
        again.end_pass(complete=True)
    values(begun(again), 3)
    # The pass ends before all batches were read.
    again.end_pass()
    if shuffle is None:
        assert rest_of(begun(again)) == whole[0]
    again.end_pass()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_pydataset_resumes_at_the_end_of_a_pass(workers: int) -> None:
    inner = Batches(workers)
    feed = make_feed(DataArguments(inner), ALONE, method="fit")
    inner.read.clear()
    feed.set_state({"passes": 0}, 10)
    assert feed.take(10, None) is None
    feed.end_pass(complete=True)
    assert not inner.read
    assert len(rest_of(begun(feed))) == 10


def test_data_that_has_become_shorter_is_an_error() -> None:
    feed = new_feed(lambda: numbers().filter(lambda x: x < 20).batch(4))
    with pytest.raises(DataError, match="ended after 5 batches, but 7 had been trained on"):
        feed.set_state({"passes": 0}, 7)

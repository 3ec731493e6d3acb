"""A tf.data iterator goes on where another was, without reading what came before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmulti import feed as feeds
from tfmulti import positions
from tfmulti.feed import make_feed
from tfmulti.strategies import Placement

ALONE = Placement(0, 1, 1)
Make = Callable[[], tf.data.Dataset]


def numbers() -> tf.data.Dataset:
    return tf.data.Dataset.range(60)


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
}


def values(iterator: Any, count: int) -> list[Any]:
    return [next(iterator).data[0].numpy().tolist() for _ in range(count)]


@pytest.mark.parametrize("name", list(DATASETS))
def test_it_goes_on_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = make_feed(DATASETS[name](), placement=ALONE)
    iterator = feed.iterate(0)
    values(iterator, 13)
    position = feed.position()
    assert position is not None
    rest = values(iterator, 25)

    again = make_feed(DATASETS[name](), placement=ALONE)
    tooks: list[int] = []
    real = tf.data.Dataset.__iter__

    class Watched:
        """An iterator that may not be read before it is where it goes on."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __next__(self) -> Any:
            tooks.append(1)
            return next(self.inner)

    monkeypatch.setattr(feeds, "set_position", lambda it, p: positions.set_position(it.inner, p))
    monkeypatch.setattr(tf.data.Dataset, "__iter__", lambda self: Watched(real(self)))
    iterator = again.iterate(0, 13, position)
    monkeypatch.undo()
    assert not tooks
    assert values(iterator.inner, 25) == rest


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
        lambda: numbers().shuffle(60, seed=1).batch(4),  # ends: see DatasetFeed.position
    ],
)
def test_what_has_no_position_is_read_again(make: Make) -> None:
    feed = make_feed(make(), placement=ALONE)
    values(feed.iterate(0), 3)
    assert feed.position() is None


def test_a_position_of_another_dataset_is_not_taken() -> None:
    feed = make_feed(numbers().shuffle(60, seed=1).repeat().batch(4), placement=ALONE)
    values(feed.iterate(0), 5)
    position = feed.position()
    assert position is not None
    other = make_feed(tf.data.Dataset.range(60).skip(4).batch(4), placement=ALONE)
    assert values(other.iterate(0, 2, position), 1) == [[12, 13, 14, 15]]


def test_a_position_that_is_too_large_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "MOST_BYTES", 100)
    feed = make_feed(numbers().repeat().batch(4), placement=ALONE)
    values(feed.iterate(0), 5)
    assert feed.position() is None
    monkeypatch.undo()
    assert feed.position() is None  # it is not tried again


class Batches(keras.utils.PyDataset):
    """Ten batches; notes which were read."""

    def __init__(self, workers: int = 1) -> None:
        super().__init__(workers=workers)
        self.read: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return np.full(3, index)


def rest_of(iterator: Any) -> list[Any]:
    return [shards.data[0].numpy().tolist() for shards in iterator]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("seed", [None, 4])
def test_a_pydataset_goes_on_without_reading_what_came_before(
    seed: int | None, workers: int
) -> None:
    """The readers of several threads hold batches that were not taken; they must not come later."""
    feed = make_feed(Batches(workers), placement=ALONE, seed=seed)
    whole = []
    for _ in range(4):
        whole.append(rest_of(feed.iterate(0)))
        feed.end_pass(whole=True)
    inner = Batches(workers)
    again = make_feed(inner, placement=ALONE, seed=seed)
    inner.read.clear()
    again.begin_after(1)
    assert not inner.read
    assert rest_of(again.iterate(0, 7)) == whole[1][7:]
    again.end_pass(whole=True)
    for expected in whole[2:]:
        assert rest_of(again.iterate(0)) == expected
        again.end_pass(whole=True)
    values(again.iterate(0), 3)
    again.end_pass()  # given up
    if seed is None:
        assert rest_of(again.iterate(0)) == whole[0]
    again.end_pass()

"""The first batches of a feed, for a trial, without taking them from the training.

A source with random access is read once more. Of other data the first batches are taken from the
iterator that the training uses, kept, and given to it again: the same tensors in the same order.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmulti.data.loader import Loader
from tfmulti.distribution.strategies import Placement
from tfmulti.training.input.dataset_feed import DatasetFeed
from tfmulti.training.input.feed import Feed, SourceFeed
from tfmulti.training.input.worker_batch import Replay


class Trial:
    """The first global batches of a feed, read alike by every worker. Close it when it is done.

    Attributes:
        batches: the global batches, as one device gets them.
        feed: what the training is to use instead of the feed.
        draws: whether code of the user's own reads the data, and may draw random numbers by
            Python's and NumPy's generators at any time.
    """

    def __init__(self, feed: Feed, batches: int, kept: int, *, sure: bool) -> None:
        """Takes the first batches.

        Args:
            batches: how many are tried.
            kept: how many are taken where the training gets them again: as many as its first
                executions have.
            sure: whether steps take from an iterator, which is known to have enough.
        """
        self.feed, self._given, self.draws = feed, feed, False
        self._iterator: Any = None
        self._close: Callable[[], None] = lambda: None
        self._optionals: Sequence[Any] = ()
        if isinstance(feed, SourceFeed):
            self.batches = _read_apart(feed, batches)
            self.begin_again()
            return
        assert isinstance(feed, DatasetFeed)
        self.draws = not feed.is_dataset
        feed.iterate(0)
        taken = []
        for _ in range(max(batches, kept)):
            found = feed.next()
            if found is None:
                break
            taken.append(found)
        self.batches = [each.get_value() for each in taken[:batches]]
        self.feed = ReplayedFeed(feed, taken)
        if not sure:
            self._optionals = taken[:batches]
        self.begin_again()

    def begin_again(self) -> None:
        """Has `source` give the batches from the first one on."""
        self._close()
        if isinstance(self._given, SourceFeed):
            again = self._given.again()
            self._iterator = again.iterate(0)
            self._close = again.close
        elif isinstance(self._given, DatasetFeed) and not self._optionals:
            self._iterator = self._given.iterator_of(self.batches)

    def source(self, step: int) -> Any:
        """Returns what an execution takes from, of the same type as in the training."""
        return self._optionals[step] if self._optionals else self._iterator

    def close(self) -> None:
        """Ends the threads that read for the trial."""
        self._close()


def _read_apart(feed: SourceFeed, count: int) -> list[Any]:
    """Returns global batches as tensors; this worker reads all of their rows."""
    reader = Loader(feed.source, feed.plan, Placement(0, 1, 1), feed.reading)
    with contextlib.closing(reader.batches()) as batches:
        found = [batch.data[0] for batch in itertools.islice(batches, count)]

    def tensor(value: Any, spec: tf.TensorSpec) -> tf.Tensor:
        return tf.constant(value, spec.dtype)

    return [tf.nest.map_structure(tensor, batch, feed.specs) for batch in found]


class ReplayedFeed:
    """A feed whose first pass has begun: its first batches were taken and are given again."""

    def __init__(self, feed: DatasetFeed, taken: Sequence[Any]) -> None:
        self._feed, self._taken = feed, list(taken)
        self._is_first = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feed, name)

    def iterate(self, first_step: int, skipped: int = 0) -> Any:
        """Returns what the first pass goes on with, or an iterator of a later pass."""
        if not self._is_first:
            return self._feed.iterate(first_step, skipped)
        self._is_first = False
        batches = [each.get_value() for each in self._taken]
        return Replay(self._feed.iterator_of(batches), len(batches), self._feed.iterator)

    def next(self) -> Any:
        """Returns the next batch: first those that were taken."""
        return self._taken.pop(0) if self._taken else self._feed.next()

    def end_pass(self, whole: bool = False) -> None:
        """Ends the pass of the feed; what was kept belongs to its first pass only."""
        self._taken = []
        self._feed.end_pass(whole)

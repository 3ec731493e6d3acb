"""Takes the first batches of a feed for a trial, and leaves them to the training, too.

The first batches of a source with random access are read once more. Other data is read only once:
its first batches are taken from the iterator of the training and kept. The training then gets the
same tensors in the same order.
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
from tfmulti.training.input.feed import SourceFeed
from tfmulti.training.input.interface import Feed
from tfmulti.training.input.worker_batch import WorkerBatch


class Trial:
    """The first global batches of a feed. Every worker reads all of their rows.

    Call `close` when the trial is done.

    Attributes:
        batches: the global batches, as one device gets them.
        runs_user_code: whether Python code of the user reads the data. Such code may draw random
            numbers from Python's and NumPy's generators at any time.
    """

    def __init__(self, feed: Feed, batches: int, replayed: int, *, is_long_enough: bool) -> None:
        """Reads the first batches.

        Args:
            feed: the feed of the training.
            batches: the number of batches of the trial.
            replayed: the number of batches that are taken from an iterator and replayed in the
                training. The first executions of the training must have exactly these batches.
            is_long_enough: whether the iterator is known to have enough batches, so that executions
                take from the iterator itself.
        """
        self._feed, self.runs_user_code = feed, False
        self._iterator: Any = None
        self._close: Callable[[], None] = lambda: None
        self._optionals: Sequence[Any] = ()
        if isinstance(feed, SourceFeed):
            self.batches = _read_apart(feed, batches)
            self.begin_again()
            return
        assert isinstance(feed, DatasetFeed)
        self.runs_user_code = not feed.is_dataset
        optionals = feed.read_first(max(batches, replayed))
        self.batches = [optional.get_value() for optional in optionals[:batches]]
        if not is_long_enough:
            self._optionals = optionals[:batches]
        self.begin_again()

    def begin_again(self) -> None:
        """Makes `source` give the batches again, from the first one on."""
        self._close()
        if isinstance(self._feed, SourceFeed):
            feed = self._feed.copy()
            self._iterator = feed.take(0, 1)
            self._close = feed.close
        elif isinstance(self._feed, DatasetFeed) and not self._optionals:
            self._iterator = self._feed.iterator_of(self.batches)

    def source(self, step: int) -> Any:
        """Returns what the execution that begins with a step takes its batches from.

        It has the same type as in the training.
        """
        return self._optionals[step] if self._optionals else self._iterator

    def close(self) -> None:
        """Ends the threads that read the data for the trial."""
        self._close()


class BatchTrial:
    """The trial of a single batch, which `train_on_batch` got.

    Attributes:
        batches: the batch, in a list.
        runs_user_code: False, because nothing is read.
    """

    def __init__(self, batch: Any, given: WorkerBatch) -> None:
        self.batches, self.runs_user_code, self._given = [batch], False, given

    def begin_again(self) -> None:
        """Does nothing, because `source` can give the batch any number of times."""

    def source(self, step: int) -> WorkerBatch:
        """Returns the batch as the training takes it."""
        return self._given


def _read_apart(feed: SourceFeed, count: int) -> list[Any]:
    """Returns the first global batches as tensors; this worker reads all of their rows."""
    # With one worker and one replica, the rows of that replica are the whole batch.
    reader = Loader(feed.examples, feed.plan, Placement(0, 1, 1), feed.reading)
    with contextlib.closing(reader.batches()) as batches:
        arrays = [batch.data[0] for batch in itertools.islice(batches, count)]

    def tensor(value: Any, spec: tf.TensorSpec) -> tf.Tensor:
        return tf.constant(value, spec.dtype)

    return [tf.nest.map_structure(tensor, batch, feed.data.specs) for batch in arrays]

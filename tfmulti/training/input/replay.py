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
from tfmulti.training.input.feed import Feed, SourceFeed
from tfmulti.training.input.positions import State
from tfmulti.training.input.worker_batch import Replay


class Trial:
    """The first global batches of a feed. Every worker reads all of their rows.

    Call `close` when the trial is done.

    Attributes:
        batches: the global batches, as one device gets them.
        feed: the feed that the training must use after the trial.
        draws: whether Python code of the user reads the data. Such code may draw random numbers
            from Python's and NumPy's generators at any time.
    """

    def __init__(self, feed: Feed, batches: int, kept: int, *, sure: bool) -> None:
        """Reads the first batches.

        Args:
            feed: the feed of the training.
            batches: the number of batches of the trial.
            kept: the number of batches that are taken from an iterator and given to the training
                again. The first executions of the training must have exactly these batches.
            sure: whether the iterator is known to have enough batches, so that executions take from
                the iterator itself.
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
        """Makes `source` give the batches again, from the first one on."""
        self._close()
        if isinstance(self._given, SourceFeed):
            again = self._given.again()
            self._iterator = again.iterate(0)
            self._close = again.close
        elif isinstance(self._given, DatasetFeed) and not self._optionals:
            self._iterator = self._given.iterator_of(self.batches)

    def source(self, step: int) -> Any:
        """Returns what an execution takes its batches from, of the same type as in the training.

        Args:
            step: the first step of the execution.
        """
        return self._optionals[step] if self._optionals else self._iterator

    def close(self) -> None:
        """Ends the threads that read the data for the trial."""
        self._close()


def _read_apart(feed: SourceFeed, count: int) -> list[Any]:
    """Returns the first global batches as tensors; this worker reads all of their rows."""
    # With one worker and one replica, the rows of that replica are the whole batch.
    reader = Loader(feed.source, feed.plan, Placement(0, 1, 1), feed.reading)
    with contextlib.closing(reader.batches()) as batches:
        found = [batch.data[0] for batch in itertools.islice(batches, count)]

    def tensor(value: Any, spec: tf.TensorSpec) -> tf.Tensor:
        return tf.constant(value, spec.dtype)

    return [tf.nest.map_structure(tensor, batch, feed.specs) for batch in found]


class ReplayedFeed:
    """A feed whose first batches were taken already, and which gives them again.

    All other methods are those of the feed itself.

    Args:
        feed: the feed, whose first pass has begun.
        taken: the batches that were taken, as Optionals.
    """

    def __init__(self, feed: DatasetFeed, taken: Sequence[Any]) -> None:
        self._feed, self._taken = feed, list(taken)
        self._is_first = True
        # The batches that the iterator in use had given when the pass began.
        self._ahead = len(taken)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feed, name)

    def iterate(self, first_step: int, skipped: int = 0) -> Any:
        """Returns the iterator of a pass; that of the first pass has the taken batches again.

        Args:
            first_step: the step, counted over all epochs.
            skipped: the batches of the pass that were trained on before.
        """
        if not self._is_first:
            return self._feed.iterate(first_step, skipped)
        self._is_first = False
        batches = [each.get_value() for each in self._taken]
        return Replay(self._feed.iterator_of(batches), len(batches), self._feed.iterator)

    def next(self) -> Any:
        """Returns the next batch, beginning with those that were taken."""
        return self._taken.pop(0) if self._taken else self._feed.next()

    def position(self, batches: int) -> State | None:
        """Returns the position of the feed, or None while its iterator is ahead of the steps.

        Args:
            batches: the batches of the pass that the steps have taken.
        """
        return None if batches < self._ahead else self._feed.position(batches)

    def end_pass(self, whole: bool = False) -> None:
        """Ends the pass of the feed, and drops the taken batches, which are of the first pass.

        Args:
            whole: whether the iterator has given each batch of the pass and was not stopped.
        """
        self._taken, self._ahead = [], 0
        self._feed.end_pass(whole)

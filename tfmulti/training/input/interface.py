"""The interface of feeds: an iterator of global batches that saves its position.

The loop uses a feed in this order:

    feed.begin_call()
    feed.set_state(state)                    only if the run is resumed
    for each pass:
        feed.begin_pass(first_step, skipped)
        source = feed.source(steps)          for an execution of several steps, or
        batch = next(feed)                   where the data may end after any batch
        state = feed.get_state(batches)      at a checkpoint
        feed.end_pass(complete)
    feed.close()
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# What `Feed.get_state` returns, in plain values and arrays.
State = dict[str, Any]


@dataclass(frozen=True)
class DataDescription:
    """What is known of the data before any batch is read.

    Attributes:
        specs: the form of one global batch, a nest whose leaves have a `shape` and a `dtype`.
        steps: the number of global batches of one pass, or None if only reading tells it.
        batches_per_iterator: the number of batches that one iterator is known to give; None if it
            has no end.
        endless: whether one iterator goes on over all epochs.
        sizes: the sizes by name that must be the same when a run is resumed.
        digest: returns a number that differs if the data differs. It returns None if each batch has
            a digest instead.
    """

    specs: Any
    steps: int | None
    batches_per_iterator: int | None
    endless: bool
    sizes: dict[str, Any]
    digest: Callable[[], int | None]

    def holds(self, batches: int | None) -> bool:
        """Returns whether one iterator is known to give enough batches.

        Args:
            batches: how many are needed; None for batches without end.
        """
        known = self.batches_per_iterator
        return known is None or (batches is not None and batches <= known)


class Feed(Iterator[Any]):
    """The global batches of a training or an evaluation, in passes.

    A pass reads each global batch of the data once.

    Attributes:
        data: what is known of the data.
    """

    data: DataDescription

    @abstractmethod
    def begin_pass(self, first_step: int = 0, skipped: int = 0) -> None:
        """Begins a pass, or continues the pass that `set_state` was given.

        A feed with random access begins at `first_step`. Any other feed begins after the first
        `skipped` batches of the pass. If it has no saved position, it reads these batches first.

        Args:
            first_step: the step, counted over all epochs.
            skipped: the batches of the pass that were trained on before.

        Raises:
            DataError: the data ends within the skipped batches.
        """

    @abstractmethod
    def source(self, steps: int) -> Any:
        """Returns the queue or iterator from which an execution of `steps` takes its batches."""

    @abstractmethod
    def __next__(self) -> Any:
        """Returns the next `WorkerBatch`, or an Optional of a global batch.

        Raises:
            StopIteration: the pass is over.
        """

    @abstractmethod
    def end_pass(self, complete: bool = False) -> None:
        """Ends the pass.

        Args:
            complete: whether the steps have taken each batch of the pass and were not stopped.
        """

    @abstractmethod
    def get_state(self, batches: int) -> State:
        """Returns the number of whole passes and, where it can be saved, the position in the pass.

        Args:
            batches: the batches of the pass that the steps have taken. Only the loop knows them,
                because executions take them from `source`.
        """

    @abstractmethod
    def set_state(self, state: State) -> None:
        """Gives a new feed the state of the feed of the stopped run.

        Each iterator may shuffle the data for the next one. So the iterators of the stopped run are
        made again, unless `state` holds the states of their random generators.

        Args:
            state: what `get_state` returned there.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the threads of the feed. A closed feed may begin another pass."""

    def begin_call(self) -> None:
        """Tells a PyDataset that `fit` or an evaluation begins, as Keras does by `on_epoch_end`."""

    def end_epoch(self) -> None:
        """Tells a PyDataset without end that an epoch has ended while its pass goes on."""

    @property
    def threads(self) -> int | None:
        """The number of threads that read examples besides the feeder thread; None if unknown."""
        return None

    def find_fault(self, *, in_files: bool = False) -> Exception | None:
        """Returns the error that tells why the data cannot be read on, or None.

        Args:
            in_files: whether to look for the bad record in the files. They are read again for that,
                so an error of TensorFlow must point at them first.
        """
        return None

"""The interface of feeds: global batches in passes, with a position that can be saved.

The loop uses a feed in this order:

    feed.set_state(state, batches)           only if the run is resumed
    for each pass:
        source = feed.take(step, steps)      for each execution
        state = feed.get_state(batches)      at a checkpoint
        feed.end_pass(complete=...)
    feed.close()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tfmulti.training.input.prefetcher import Prefetcher

# The method of a model that takes the data.
Method = Literal["fit", "evaluate", "predict"]

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
        fault_in_files: reads the files of the data again, and returns the first fault in them, or
            None.
    """

    specs: Any
    steps: int | None
    batches_per_iterator: int | None
    endless: bool
    sizes: dict[str, Any]
    digest: Callable[[], int | None]
    fault_in_files: Callable[[], str | None] = lambda: None

    def holds(self, batches: int | None) -> bool:
        """Returns whether one iterator is known to give enough batches.

        Args:
            batches: how many are needed; None for batches without end.
        """
        known = self.batches_per_iterator
        return known is None or (batches is not None and batches <= known)


class Feed(ABC):
    """The global batches of a training or an evaluation, in passes.

    A pass reads each global batch of the data once.

    Attributes:
        data: what is known of the data.
        reader: what reads this worker's rows ahead. None if nothing is read yet, or if TensorFlow
            reads the data.
    """

    data: DataDescription
    reader: Prefetcher | None = None

    @abstractmethod
    def take(self, step: int, steps: int | None) -> Any:
        """Returns what the next execution takes its batches from, or None if the pass is over.

        It begins a pass if none is open.

        Args:
            step: the first step of the execution, counted over all epochs.
            steps: the number of steps of an execution that takes from a queue or an iterator. None
                gives a single batch instead, because the data may end after any batch.
        """

    @abstractmethod
    def end_pass(self, *, complete: bool = False) -> None:
        """Ends the pass, if one is open.

        Args:
            complete: whether the steps have taken each batch of the pass and were not stopped.
        """

    @abstractmethod
    def get_state(self, batches: int) -> State:
        """Returns the number of whole passes and, where it can be saved, the position in the pass.

        Args:
            batches: the batches of the pass that the steps have taken. Only the loop knows them,
                because executions take them from a queue or an iterator.
        """

    @abstractmethod
    def set_state(self, state: State, batches: int = 0) -> None:
        """Brings a new feed to the position of the feed of the stopped run.

        Each iterator may shuffle the data for the next one. So the iterators of the stopped run are
        made again, unless `state` holds the states of their random generators.

        Args:
            state: what `get_state` returned there.
            batches: the batches of the pass that were trained on before. If `state` has no
                position, they are read first.

        Raises:
            DataError: the data ends within these batches.
        """

    def close(self) -> None:
        """Ends the threads of the feed."""
        if self.reader is not None:
            self.reader.close()
            self.reader = None

"""Feeds of data that comes in global batches: a `tf.data.Dataset`, a PyDataset, a generator, ….

Every worker reads the same global batches. A resumed run finds its position in them as follows:

- A PyDataset of known length begins at any batch (`PyDatasetFeed`).
- TensorFlow saves the position of a Dataset's iterator, if it can save all of it (`positions`).
- All other data is read again from the start of the pass. Before that, the iterators of the earlier
  passes are made again, because making an iterator draws the orders of its shuffles. The batches of
  these passes are read only if the order of a later pass depends on that.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfmulti.data.formats.gzip_faults import fault_of
from tfmulti.errors import DataError
from tfmulti.keras_patches.datasets import batches_of
from tfmulti.training.input import pipeline
from tfmulti.training.input.interface import DataDescription, Feed, State
from tfmulti.training.input.positions import (
    form_of,
    is_complete,
    iterator_at,
    must_be_read,
    position_of,
    reads_ahead,
)
from tfmulti.training.input.worker_batch import PREFETCH_STEPS


class DatasetFeed(Feed):
    """A `tf.data.Dataset`, generator or DataLoader of global batches, or an endless PyDataset.

    A Dataset's iterators share the random generators of its shuffles. Each iterator draws from them
    when it is made. So this class makes as many iterators as Keras' `fit`, in the same order. Keras
    makes one more at the end of a pass of known length. With `steps_per_epoch` the next pass uses
    that iterator. Without it, nothing reads it.

    Args:
        x: the data.
        class_weight: the weight of each class, or None.
        uses_next: whether the data is for a `fit` with `steps_per_epoch`.

    Raises:
        DataError: the data has no batches, or its batches cannot be cut into rows.
    """

    def __init__(self, x: Any, class_weight: Any, *, uses_next: bool = False) -> None:
        self._x, self._class_weight = x, class_weight
        self._uses_next = uses_next
        self._build()
        count = self._adapter.num_batches
        steps = None if count is None else int(count)
        if steps == 0:
            raise DataError("the data has no batches. Give a Dataset that yields at least one.")
        cardinality = int(self._dataset.cardinality())
        is_infinite = cardinality == tf.data.INFINITE_CARDINALITY
        self.data = DataDescription(
            specs=self._dataset.element_spec,
            steps=steps,
            batches_per_iterator=None if is_infinite else max(cardinality, steps or 0),
            endless=False,
            sizes={"steps": steps},
            digest=lambda: None,
        )
        self._passes = self._unread = 0
        self._iterator: Any = None
        # Whether the iterator in use has given all batches of a pass.
        self._has_ended = False
        # The batches of `give_again` that no step has taken yet, and an iterator of all of them.
        self._replayed: list[Any] = []
        self._replay_iterator: Any = None
        # Whether TensorFlow may save the position of an iterator of this data.
        self._saves_position = self.is_dataset
        # The position in the pass at which the iterator in use was restored.
        self._restored_at = 0
        is_endless = isinstance(x, keras.utils.PyDataset) and x.num_batches is None
        self._endless = x if is_endless else None

    def _build(self) -> None:
        """Makes Keras' adapter of the data, and the Dataset that reads its batches ahead."""
        try:
            self._adapter = batches_of(self._x, self._class_weight)
        except ValueError as error:
            raise DataError(str(error)) from None
        self._dataset = self._adapter.get_tf_dataset()
        pipeline.check_known_rows(self._dataset.element_spec)
        self._must_be_read = must_be_read(self._dataset)
        ahead = PREFETCH_STEPS
        # Reading a batch of such a Dataset may draw an order from a generator that the next
        # iterator shares. So as many batches are read ahead as by plain TensorFlow. It adds a
        # prefetch of one batch, unless the Dataset ends in an operation that reads ahead itself.
        if self._must_be_read:
            ahead = 0 if reads_ahead(self._dataset) else 1
        self._batches = pipeline.read_ahead(self._dataset, ahead)

    def begin_pass(self, first_step: int = 0, skipped: int = 0) -> None:
        if self._replayed:
            return
        # If no batch is skipped, this is a new pass.
        self._has_ended = skipped > 0 and (self._has_ended or skipped == self.data.steps)
        self._adapter.on_epoch_begin()
        if self._has_ended:
            self._skip_pass()
            return
        if self._iterator is None:
            self._iterator = iter(self._batches)
        for batches in range(self._restored_at, skipped):
            if next(self._iterator, None) is None:
                raise DataError(
                    f"the data has ended after {batches} batches, but {skipped} had been trained "
                    "on in this pass. Give the same data, or begin a new run in a new folder."
                )

    @property
    def is_dataset(self) -> bool:
        """Whether the data is a `tf.data.Dataset`, so that no Python code of the user reads it."""
        return isinstance(self._x, tf.data.Dataset)

    def give_again(self, optionals: Sequence[Any]) -> None:
        """Gives the first batches of the pass, which were read before, to the steps again.

        The next executions together must take exactly these batches.
        """
        self._replayed = list(optionals)
        batches = [optional.get_value() for optional in optionals]
        self._replay_iterator = self.iterator_of(batches)

    def source(self, steps: int) -> Any:
        if not self._replayed:
            return self._iterator
        del self._replayed[:steps]
        return self._replay_iterator

    def iterator_of(self, batches: Sequence[Any]) -> Any:
        """Returns an iterator of some global batches, of the same type as the one in use."""
        # This Dataset is empty, and has the form of all batches.
        dataset = self._dataset.take(0)
        for batch in batches:
            dataset = dataset.concatenate(tf.data.Dataset.from_tensors(batch))
        return iter(pipeline.read_ahead(dataset))

    def __next__(self) -> Any:
        if self._replayed:
            return self._replayed.pop(0)
        batch = None if self._has_ended else self._iterator.get_next_as_optional()
        self._has_ended = batch is None or not batch.has_value()
        if self._has_ended:
            raise StopIteration
        return batch

    def begin_call(self) -> None:
        # A PyDataset may shuffle then.
        self._adapter.on_epoch_end()

    def end_epoch(self) -> None:
        # A PyDataset that ends may shuffle for its next pass, but not within a pass.
        if self._endless is not None:
            self._endless.on_epoch_end()
            self._endless.on_epoch_begin()

    def end_pass(self, complete: bool = False) -> None:
        self._passes += 1
        self._adapter.on_epoch_end()
        self._iterator, self._restored_at, self._replayed = None, 0, []
        self._has_ended = False
        if complete and self.is_dataset and self.data.steps is not None:
            # Keras makes an iterator at the end of a pass of known length.
            next_iterator = iter(self._batches)
            if self._uses_next:
                self._iterator = next_iterator
            else:
                self._unread += 1

    def get_state(self, batches: int) -> State:
        has_ended = self._has_ended or batches == self.data.steps
        state = {"passes": self._passes, "unread": self._unread, "has_ended": has_ended}
        if has_ended or self._iterator is None or self._replayed or not self._saves_position:
            return state
        position = position_of(self._iterator)
        # To find out that a position is too large takes long, so it is tried once only.
        self._saves_position = position is not None
        if position is None or not is_complete(position, self._batches):
            return state
        return state | {"form": form_of(self._batches), "iterator": position, "batches": batches}

    def set_state(self, state: State) -> None:
        self._has_ended = state.get("has_ended", False)
        position = None if self._has_ended else state.get("iterator")
        if position is not None and state.get("form") == form_of(self._batches):
            self._iterator = iterator_at(position, self._batches)
        if self._iterator is not None:
            self._passes, self._unread = state["passes"], state.get("unread", 0)
            self._restored_at = state["batches"]
            return
        for number in range(state["passes"]):
            self._passes += 1
            self._adapter.on_epoch_begin()
            self._skip_pass()
            self._adapter.on_epoch_end()
            if number < state.get("unread", 0):
                self._unread += 1
                iter(self._batches)

    def _skip_pass(self) -> None:
        """Draws the orders of a pass from which no step will take a batch."""
        # The iterator draws the seeds of its shuffles when it is made.
        iterator = iter(self._batches)
        if self._must_be_read and not self.data.holds(None):
            for _ in iterator:
                pass

    def find_fault(self, *, in_files: bool = False) -> Exception | None:
        fault = fault_of(self._x) if in_files else None
        if fault is None:
            return None
        error: DataError = DataError(
            f"{fault}. Repair or remove it. A GZIP file is read as a stream, from which no record "
            "is left out: gunzip the files for --skip_bad_records."
        )
        return error

    def close(self) -> None:
        pass


class PyDatasetFeed(DatasetFeed):
    """The feed of a PyDataset with a known number of batches, which can begin at any of them.

    Args:
        x: the PyDataset.
        class_weight: the weight of each class, or None.
        is_training: whether one call of `fit` makes all passes. Otherwise each pass is an
            evaluation of its own.
    """

    def __init__(self, x: InOrder, class_weight: Any, *, is_training: bool) -> None:
        super().__init__(x, class_weight)
        self._in_order, self._is_training = x, is_training
        # Whether Keras' readers may hold batches of an earlier pass.
        self._is_used = False

    def begin_pass(self, first_step: int = 0, skipped: int = 0) -> None:
        if self._replayed:
            return
        self._in_order.begin_at = 0
        if self._is_used:
            self._build()
        self._in_order.begin_at, self._is_used = skipped, True
        self._adapter.on_epoch_begin()
        rest = self._batches.take(len(self._in_order) - skipped) if skipped else self._batches
        self._iterator = iter(rest)

    def end_pass(self, complete: bool = False) -> None:
        super().end_pass(complete)
        if complete:
            self._is_used = self._in_order.begin_at > 0

    def set_state(self, state: State) -> None:
        # The PyDataset is called directly, without Keras' readers, so nothing is read.
        for _ in range(state["passes"]):
            self._passes += 1
            if not self._is_training:
                self._in_order.on_epoch_end()
            self._in_order.on_epoch_begin()
            self._in_order.on_epoch_end()


class InOrder(keras.utils.PyDataset):
    """A PyDataset whose batches come in the same shuffled order on all workers.

    Each pass has another order.

    Args:
        inner: the user's PyDataset.
        seed: the seed of the orders; None keeps the order of `inner`.

    Attributes:
        begin_at: the batch at which the next pass begins, counted in its order.
    """

    def __init__(self, inner: keras.utils.PyDataset, seed: int | None) -> None:
        super().__init__(inner.workers, inner.use_multiprocessing, inner.max_queue_size)
        self._inner, self._random = inner, None if seed is None else random.Random(seed)
        self._order = list(range(inner.num_batches))
        self.begin_at = 0
        self._shuffle()

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Any:
        # If a pass begins later, `PyDatasetFeed` does not take the batches beyond its end.
        return self._inner[self._order[(index + self.begin_at) % len(self._order)]]

    def _shuffle(self) -> None:
        """Draws the order of the next pass."""
        if self._random is not None:
            self._random.shuffle(self._order)

    def on_epoch_begin(self) -> None:
        self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        # Keras starts its readers before `on_epoch_begin`. They have stopped here, so the order may
        # change.
        self._shuffle()
        self._inner.on_epoch_end()

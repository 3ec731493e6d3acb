"""Feeds of data that comes in global batches: a `tf.data.Dataset`, a PyDataset, a generator, ….

Every worker reads the same global batches. A resumed run finds its position in them as follows:

- A PyDataset of known length begins at any batch (`PyDatasetFeed`).
- TensorFlow saves the position of a Dataset's iterator, if it can save all of it (`positions`).
- All other data is read again from the start of the pass. Before that, the iterators of the earlier
  passes are made again, because making an iterator draws the orders of its shuffles. The batches of
  these passes are read only if the order of a later pass depends on that.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfmulti.data.formats.gzip_faults import fault_of
from tfmulti.errors import DataError
from tfmulti.keras_patches.datasets import batches_of
from tfmulti.training.input import pipeline
from tfmulti.training.input.interface import DataDescription, Feed, Method, State
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
        method: what takes the data. `fit` makes all passes in one call. Each other pass is a call
            of its own.
        steps_per_epoch: the `steps_per_epoch` of `fit`, or None.

    Raises:
        DataError: the data has no batches, or its batches cannot be cut into rows.
    """

    def __init__(
        self, x: Any, class_weight: Any, method: Method, steps_per_epoch: int | None = None
    ) -> None:
        self._x, self._class_weight = x, class_weight
        self._method, self._steps_per_epoch = method, steps_per_epoch
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
            fault_in_files=functools.partial(fault_of, x),
        )
        self._passes = self._unread = 0
        self._iterator: Any = None
        self._is_open = False
        # Whether the open pass has given all of its batches.
        self._has_ended = False
        # The batches of `read_first` that no step has taken yet, and an iterator of all of them.
        self._replayed: list[Any] = []
        self._replay_iterator: Any = None
        # Whether TensorFlow may save the position of an iterator of this data.
        self._saves_position = self.is_dataset

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

    def _begin(self) -> None:
        """Begins a pass."""
        if self._resets:
            self._adapter.on_epoch_end()
        self._adapter.on_epoch_begin()
        if self._iterator is None:
            self._iterator = iter(self._batches)
        self._is_open = True

    @property
    def _resets(self) -> bool:
        """Whether `fit` or an evaluation begins with the next pass.

        Keras calls the `on_epoch_end` of a PyDataset then, too, and the PyDataset may shuffle.
        """
        return self._method == "evaluate" or (self._method == "fit" and not self._passes)

    @property
    def is_dataset(self) -> bool:
        """Whether the data is a `tf.data.Dataset`, so that no Python code of the user reads it."""
        return isinstance(self._x, tf.data.Dataset)

    def read_first(self, count: int) -> Sequence[Any]:
        """Begins a pass, and returns the Optionals of its first `count` batches.

        The steps get these batches again. The next executions together must take exactly them.
        """
        self._begin()
        optionals = list(itertools.islice(iter(self._next, None), count))
        self._replayed = list(optionals)
        self._replay_iterator = self.iterator_of([each.get_value() for each in optionals])
        return optionals

    def take(self, step: int, steps: int | None) -> Any:
        goes_on = self._is_open and self._steps_per_epoch and not step % self._steps_per_epoch
        if not self._is_open:
            self._begin()
        if self._replayed:
            if steps is None:
                return self._replayed.pop(0)
            del self._replayed[:steps]
            return self._replay_iterator
        if goes_on and isinstance(self._x, keras.utils.PyDataset):
            # An epoch has ended within the pass of a PyDataset without end.
            self._x.on_epoch_end()
            self._x.on_epoch_begin()
        return self._next() if steps is None else self._iterator

    def _next(self) -> Any:
        """Returns an Optional of the next batch, or None if the pass is over."""
        batch = None if self._has_ended else self._iterator.get_next_as_optional()
        self._has_ended = batch is None or not batch.has_value()
        return None if self._has_ended else batch

    def iterator_of(self, batches: Sequence[Any]) -> Any:
        """Returns an iterator of some global batches, of the same type as the one in use."""
        # This Dataset is empty, and has the form of all batches.
        dataset = self._dataset.take(0)
        for batch in batches:
            dataset = dataset.concatenate(tf.data.Dataset.from_tensors(batch))
        return iter(pipeline.read_ahead(dataset))

    def end_pass(self, *, complete: bool = False) -> None:
        if not self._is_open:
            return
        self._passes += 1
        self._adapter.on_epoch_end()
        self._iterator, self._replayed = None, []
        self._is_open = self._has_ended = False
        if complete and self.is_dataset and self.data.steps is not None:
            # Keras makes an iterator at the end of a pass of known length.
            next_iterator = iter(self._batches)
            if self._steps_per_epoch:
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

    def set_state(self, state: State, batches: int = 0) -> None:
        position, skipped = state.get("iterator"), 0
        has_ended = batches > 0 and (state.get("has_ended", False) or batches == self.data.steps)
        if position is not None and not has_ended and state.get("form") == form_of(self._batches):
            self._iterator = iterator_at(position, self._batches)
        if self._iterator is not None:
            self._passes, self._unread = state["passes"], state.get("unread", 0)
            skipped = state["batches"]
        else:
            for number in range(state["passes"]):
                self._skip_pass()
                self.end_pass(complete=number < state.get("unread", 0))
        if has_ended:
            self._skip_pass()
            return
        if batches:
            self._begin()
        for number in range(skipped, batches):
            if next(self._iterator, None) is None:
                raise DataError(
                    f"the data has ended after {number} batches, but {batches} had been trained "
                    "on in this pass. Give the same data, or begin a new run in a new folder."
                )

    def _skip_pass(self) -> None:
        """Begins a pass from which no step will take a batch, and draws its orders."""
        self._begin()
        if self._must_be_read and not self.data.holds(None):
            for _ in self._iterator:
                pass
        self._iterator, self._has_ended = None, True


class PyDatasetFeed(DatasetFeed):
    """The feed of a PyDataset with a known number of batches, which can begin at any of them.

    Args:
        x: the PyDataset.
        class_weight: the weight of each class, or None.
        method: what takes the data; see `DatasetFeed`.
    """

    def __init__(self, x: InOrder, class_weight: Any, method: Method) -> None:
        super().__init__(x, class_weight, method)
        self._in_order = x
        # Whether Keras' readers may hold batches of an earlier pass.
        self._is_used = False

    def _begin(self, skipped: int = 0) -> None:
        self._in_order.begin_at = 0
        if self._is_used:
            self._build()
        self._in_order.begin_at, self._is_used = skipped, True
        super()._begin()

    def end_pass(self, *, complete: bool = False) -> None:
        super().end_pass()
        if complete:
            self._is_used = False

    def set_state(self, state: State, batches: int = 0) -> None:
        # The PyDataset is called directly, without Keras' readers, so nothing is read.
        for _ in range(state["passes"]):
            if self._resets:
                self._in_order.on_epoch_end()
            self._in_order.on_epoch_begin()
            self._in_order.on_epoch_end()
            self._passes += 1
        if batches:
            self._begin(batches)
        if batches == self.data.steps:
            self._iterator, self._has_ended = None, True


class InOrder(keras.utils.PyDataset):
    """A PyDataset whose batches come in the same shuffled order on all workers.

    Each pass has another order.

    Args:
        inner: the user's PyDataset.
        seed: the seed of the orders; None keeps the order of `inner`.

    Attributes:
        begin_at: the batch at which the next pass begins, counted in its order. The length is the
            number of batches from there on.
    """

    def __init__(self, inner: keras.utils.PyDataset, seed: int | None) -> None:
        super().__init__(inner.workers, inner.use_multiprocessing, inner.max_queue_size)
        self._inner, self._random = inner, None if seed is None else random.Random(seed)
        self._order = list(range(inner.num_batches))
        self.begin_at = 0
        self._shuffle()

    def __len__(self) -> int:
        return len(self._order) - self.begin_at

    def __getitem__(self, index: int) -> Any:
        return self._inner[self._order[self.begin_at + index]]

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

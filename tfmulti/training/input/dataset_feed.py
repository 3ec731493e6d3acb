"""Batches of the user's own: a `tf.data.Dataset`, a PyDataset, a generator, a DataLoader."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfmulti.data.formats.gzip_faults import fault_of
from tfmulti.errors import DataError, ResumeError
from tfmulti.keras_patches.datasets import batches_of
from tfmulti.training.input import pipeline
from tfmulti.training.input.positions import (
    Position,
    State,
    draws_when_read,
    form_of,
    has_known_names,
    holds_all,
    in_passes,
    must_be_read,
    position_of,
    random_states_in,
    random_states_of,
    reads_ahead,
    set_position,
)
from tfmulti.training.input.worker_batch import PREFETCH_STEPS


class DatasetFeed:
    """A `tf.data.Dataset`, generator or DataLoader of global batches, or an endless PyDataset.

    A Dataset's iterators share the generators of its shuffles, and each one draws when it is made.
    So this class makes as many iterators as Keras' `fit`, in the same order. Keras makes one more
    at the end of a pass whose number of batches is known: with `steps_per_epoch` the next pass
    takes it (`next_is_made`), and without it nothing reads it. The property `unread` counts the
    iterators that nothing reads.
    """

    endless = False

    def __init__(self, x: Any, class_weight: Any, *, next_is_made: bool = False) -> None:
        self._x, self._class_weight = x, class_weight
        self._next_is_made = next_is_made
        self._next_is_due = False  # Keras has made the iterator of the next pass, but not this feed
        self._build()
        if self.steps == 0:
            raise DataError("the data has no batches. Give a Dataset that yields at least one.")
        self.passes = self.unread = 0
        self._iterator: Any = None
        self._has_ended = False  # it has given all batches of a pass
        self._all_passes: tf.data.Dataset | None = None
        self._keeps_position = False
        self._random_states: int | None = None  # that a whole position has
        self._whole: tuple[int, Position] | None = None  # the last one of this pass, and where
        self._given = 0  # batches of its pass that the iterator in use had given when it was made
        endless = isinstance(x, keras.utils.PyDataset) and x.num_batches is None
        self._without_end = x if endless else None

    def _build(self) -> None:
        try:
            self._adapter = batches_of(self._x, self._class_weight)
        except ValueError as error:
            raise DataError(str(error)) from None
        self._dataset = self._adapter.get_tf_dataset()
        pipeline.check_known_rows(self._dataset.element_spec)
        self._batches = pipeline.read_ahead(self._dataset, self._batches_ahead)

    @property
    def _batches_ahead(self) -> int:
        """How many batches are read while a step runs.

        To read one may draw an order from a generator that the next iterator shares. So of such a
        Dataset as many are read as plain TensorFlow reads: it adds a prefetch of its own, which
        holds one batch as long as steps do not wait for it, where the Dataset does not end in
        something that reads ahead already.
        """
        if not draws_when_read(self._dataset):
            return PREFETCH_STEPS
        return 0 if reads_ahead(self._dataset) else 1

    @property
    def steps(self) -> int | None:
        count = self._adapter.num_batches
        return None if count is None else int(count)

    @property
    def specs(self) -> Any:
        return self._dataset.element_spec

    @property
    def form(self) -> dict[str, Any]:
        return {"steps": self.steps}

    @property
    def digest(self) -> int | None:
        return None

    def holds(self, batches: int | None) -> bool:
        known = int(self._dataset.cardinality())
        if known == tf.data.INFINITE_CARDINALITY:
            return True
        return batches is not None and batches <= max(known, self.steps or 0)

    def iterate(self, first_step: int, skipped: int = 0) -> Any:
        self.passes += 1
        self._next_is_due = False
        self._has_ended = self._has_ended and skipped > 0  # else this is the next pass
        self._adapter.on_epoch_begin()
        if self._has_ended:
            return self._pass_over() if self._iterator is None else self._iterator
        if self._iterator is None:
            self._iterator = self._new_iterator()
        for batches in range(self._given, skipped):
            taken = next(self._iterator)
            if self._all_passes is not None and not taken.has_value():
                raise DataError(
                    f"the data has ended after {batches} batches, but {skipped} had been trained "
                    "on in this pass. Give the same data, or begin a new run in a new folder."
                )
        return self._iterator

    @property
    def _source(self) -> tf.data.Dataset:
        """What an iterator is made of."""
        return self._batches if self._all_passes is None else self._all_passes

    def _new_iterator(self) -> Any:
        iterator = iter(self._source)
        if self._keeps_position and self._random_states is None:
            found = position_of(iterator)
            self._keeps_position = found is not None
            known = random_states_of(self._batches)
            self._random_states = max(known, random_states_in(found or {}))
        return iterator

    @property
    def is_dataset(self) -> bool:
        """Whether the data is a `tf.data.Dataset`, and not read by code of the user's own."""
        return isinstance(self._x, tf.data.Dataset)

    @property
    def iterator(self) -> Any:
        """The iterator in use."""
        return self._iterator

    def iterator_of(self, batches: Sequence[Any]) -> Any:
        """Returns an iterator of these batches, of the same type as the one in use."""
        given = self._dataset.take(0)  # it reads nothing, and has the form of all batches
        for batch in batches:
            given = given.concatenate(tf.data.Dataset.from_tensors(batch))
        given = pipeline.read_ahead(given)
        return iter(given if self._all_passes is None else in_passes(given))

    def next(self) -> Any:
        if self._has_ended:
            return None
        if self._all_passes is None:
            taken = self._iterator.get_next_as_optional()
        else:
            taken = next(self._iterator)
        self._has_ended = not taken.has_value()
        return None if self._has_ended else taken

    def keep_position(self) -> None:
        if self._iterator is not None:
            return  # it was made for a trial of the first batches, and told before
        self._keeps_position = isinstance(self._x, tf.data.Dataset) and holds_all(self._batches)
        if self._keeps_position and not self.holds(None):
            self._all_passes = in_passes(self._batches, unread=self._leaves_one_unread)

    def position(self, batches: int) -> State | None:
        state = {"has_ended": self._has_ended, "form": form_of(self._source)}
        if not self._keeps_position or self._iterator is None:
            return state
        found = position_of(self._iterator)
        if found is None:
            self._keeps_position = False  # it is too large: to find it out takes long
            return state
        lacks_seeds = random_states_in(found) < (self._random_states or 0)
        if not lacks_seeds:
            self._whole = batches, found
        elif self._has_ended or not batches:
            return state  # between passes: they are made again, and nothing is read
        elif not self._draws_once_a_pass:
            if self._whole is None:
                return state
            batches, found = self._whole  # and on from there by reading
            lacks_seeds = False
        return state | {"iterator": found, "batches": batches, "lacks_seeds": lacks_seeds}

    @property
    def _draws_once_a_pass(self) -> bool:
        """Whether each shuffle draws one order a pass, when the pass's iterator is made."""
        return self._all_passes is not None and not must_be_read(self._batches)

    def begin_call(self) -> None:
        self._adapter.on_epoch_end()  # of a PyDataset, which may shuffle then

    def end_epoch(self) -> None:
        if self._without_end is not None:  # others may shuffle for the next pass, not within one
            self._without_end.on_epoch_end()
            self._without_end.on_epoch_begin()

    def end_pass(self, whole: bool = False) -> None:
        self._adapter.on_epoch_end()
        ended = whole or self._has_ended
        goes_on = self._all_passes is not None and self._keeps_position and ended
        goes_on = goes_on and self._iterator is not None
        if not goes_on:
            self._iterator = None
        elif not self._has_ended:
            next(self._iterator)  # the mark of the end
        if not self._keeps_position:
            self._all_passes = None  # numbers that no seed gives begin anew with an iterator
        self._has_ended, self._whole, self._given = ended, None, 0
        if whole:
            self._begin_next(goes_on)

    def _begin_next(self, goes_on: bool) -> None:
        """Makes the iterator that Keras makes at the end of a pass of known length."""
        if self._leaves_one_unread:
            self.unread += 1
            if not goes_on:  # else the iterator of all passes has made it
                iter(self._batches)
        elif self._is_known_dataset:
            if goes_on:
                self._next_is_due = True
            else:
                self._iterator = iter(self._batches)

    @property
    def _is_known_dataset(self) -> bool:
        return isinstance(self._x, tf.data.Dataset) and self.steps is not None

    @property
    def _leaves_one_unread(self) -> bool:
        """Whether Keras makes an iterator at the end of each pass that nothing reads."""
        return self._is_known_dataset and not self._next_is_made

    def begin_after(self, passes: int, position: State | None = None, unread: int = 0) -> None:
        unread = min(unread, passes)
        state = position or {}
        self._has_ended = state.get("has_ended", False)
        fits = state.get("iterator") is not None and state.get("form") == form_of(self._source)
        if fits and has_known_names(state["iterator"]):
            self._iterator = self._restored(state, passes + unread)
        self.unread = unread
        if self._iterator is not None:
            self.passes, self._given = passes, state["batches"]
            return
        for number in range(passes):
            self.passes += 1
            self._adapter.on_epoch_begin()
            self._pass_over()
            self._adapter.on_epoch_end()
            if number < unread:
                iter(self._batches)

    def _restored(self, state: State, made: int) -> Any:
        """Returns an iterator at a saved position. `made` iterators were made before it.

        A shuffle that has given its last row is not in a position. How many orders it has drawn
        is in that of an iterator that was made as the pass's was.

        Raises:
            ResumeError: TensorFlow does not take the position. The pass cannot be read again
                instead: the iterator that was tried has drawn a seed of each shuffle.
        """
        of_pass = None
        for _ in range(made + 1 if state["lacks_seeds"] else 0):
            of_pass = iter(self._source)
        seeds = position_of(of_pass) if of_pass is not None else None
        iterator = self._new_iterator()
        if not set_position(iterator, state["iterator"]):
            raise ResumeError(
                "TensorFlow does not take the position in the data of the newest checkpoint. "
                "Remove "
                "that file: the run goes on from the checkpoint before it."
            )
        if seeds is not None:
            set_position(of_pass, seeds)  # last: all iterators share what the next pass draws by
        return iterator

    def _pass_over(self) -> Any:
        """Returns an iterator of a pass of which nothing will be taken."""
        iterator = iter(self._batches)  # when it is made it draws the seed of its shuffle
        if must_be_read(self._batches) and not self.holds(None):
            for _ in iterator:
                pass
        return iterator

    @property
    def error(self) -> Exception | None:
        return None

    def find_fault(self) -> str | None:
        return fault_of(self._x)

    @property
    def threads(self) -> int | None:
        return None

    def close(self) -> None:
        if self._next_is_due:
            self._next_is_due = False
            iter(self._batches)


class PyDatasetFeed(DatasetFeed):
    """A PyDataset with a known number of batches: any of them is read at once.

    `is_training` says that one call has all passes; else each is an evaluation of its own.
    """

    def __init__(self, x: InOrder, class_weight: Any, *, is_training: bool) -> None:
        super().__init__(x, class_weight)
        self._in_order, self._is_training = x, is_training
        self._is_used = False  # its readers may hold batches of an earlier pass

    def iterate(self, first_step: int, skipped: int = 0) -> Any:
        self.passes += 1
        self._has_ended = False
        self._in_order.begin_at = 0
        if self._is_used:
            self._build()
        self._in_order.begin_at, self._is_used = skipped, True
        self._adapter.on_epoch_begin()
        rest = self._batches.take(len(self._in_order) - skipped) if skipped else self._batches
        self._iterator = iter(rest)
        return self._iterator

    def keep_position(self) -> None:
        pass

    def position(self, batches: int) -> State | None:
        return None

    def end_pass(self, whole: bool = False) -> None:
        super().end_pass(whole)
        if whole:
            self._is_used = self._in_order.begin_at > 0

    def begin_after(self, passes: int, position: State | None = None, unread: int = 0) -> None:
        for _ in range(passes):  # without its readers: nothing is read
            self.passes += 1
            if not self._is_training:
                self._in_order.on_epoch_end()
            self._in_order.on_epoch_begin()
            self._in_order.on_epoch_end()


class InOrder(keras.utils.PyDataset):
    """A PyDataset whose batches come in an order that all workers draw alike, anew each pass.

    `seed` None keeps the order. The pass that is begun next starts at its batch `begin_at`.
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
        # Where a pass does not start at its first batch, the last ones of it are not taken.
        return self._inner[self._order[(index + self.begin_at) % len(self._order)]]

    def _shuffle(self) -> None:
        if self._random is not None:
            self._random.shuffle(self._order)

    def on_epoch_begin(self) -> None:
        self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        # Keras starts its readers before on_epoch_begin, and has stopped them here.
        self._shuffle()
        self._inner.on_epoch_end()

"""What `fit`, `evaluate` and `predict` are given, as batches of this worker's shares."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat, pipeline
from tfmulti.errors import DataError, ModelError
from tfmulti.plan import Plan
from tfmulti.positions import Position, position_of, set_position
from tfmulti.reading import Reading
from tfmulti.shards import Ahead
from tfmulti.sources.arrays import ArraySource
from tfmulti.sources.class_weights import Weighted
from tfmulti.sources.source import Source, map_nest
from tfmulti.strategies import Placement
from tfmulti.streams import DEFAULT, AnyStream, specs_of, stream_of

DEFAULT_BATCH_SIZE = 32  # Keras' own


class Feed(Protocol):
    """One part of the data, ready for `make_execution`.

    `steps` is the number of global batches of one pass, or None where only reading tells.
    `specs` has the form of one global batch: leaves with `shape` and `dtype`.
    """

    @property
    def steps(self) -> int | None: ...

    @property
    def specs(self) -> Any: ...

    @property
    def endless(self) -> bool:
        """Whether one iterator goes on over all epochs."""

    @property
    def form(self) -> dict[str, Any]:
        """What must be the same for a run to resume: sizes by name."""

    @property
    def digest(self) -> int | None:
        """A number that is another one where the data is another; None: it tells by its batches."""

    @property
    def passes(self) -> int:
        """How many iterators were made."""

    def holds(self, batches: int | None) -> bool:
        """Whether one iterator is known to give so many batches; None: without end."""

    def iterate(self, first_step: int, skipped: int = 0, position: Position | None = None) -> Any:
        """Returns an iterator of `Shards`.

        A feed with random access starts at that step, counted over all epochs; another one
        starts a pass of its data after the first `skipped` batches: at that position of it, or
        where that is not known by reading them.
        """

    def position(self) -> Position | None:
        """Returns where the iterator in use is, where it takes more than counting and is known."""

    def end_epoch(self) -> None:
        """Is called at the end of an epoch where the iterator goes on."""

    def end_pass(self, whole: bool = False) -> None:
        """Is called when an iterator has given its last batch, or is given up.

        `whole`: it has given each batch of one pass of the data.
        """

    def begin_after(self, passes: int) -> None:
        """Puts a new feed where it is after so many iterators: each may shuffle for the next."""

    @property
    def error(self) -> Exception | None:
        """Why the data cannot be read on, if that is so."""

    @property
    def threads(self) -> int | None:
        """How many threads read examples (0: the one that feeds the steps), if that is known."""

    def close(self) -> None:
        """Ends its threads. A feed that is closed may be iterated anew."""


class SourceFeed:
    """A source with random access under a plan."""

    endless = True

    def __init__(
        self,
        source: Source,
        plan: Plan,
        placement: Placement,
        reading: Reading = DEFAULT,
    ) -> None:
        self._source, self._plan, self._placement = source, plan, placement
        self._reading = reading
        self.passes = 0
        self._stream: AnyStream | None = None
        self._taken: Any = None
        self._is_at_start = False

    @property
    def steps(self) -> int:
        return self._plan.steps_per_epoch

    @property
    def specs(self) -> Any:
        rows = self._plan.global_batch_size
        return specs_of(self._source.specs, rows)

    @property
    def form(self) -> dict[str, Any]:
        return {
            "examples": self._plan.examples,
            "global_batch_size": self._plan.global_batch_size,
        }

    @property
    def digest(self) -> int | None:
        return self._source.digest()

    def holds(self, batches: int | None) -> bool:
        return True

    def iterate(self, first_step: int, skipped: int = 0, position: Position | None = None) -> Any:
        self.passes += 1
        if self._stream is None or first_step or not self._is_at_start:
            self.close()
            self._stream = stream_of(
                self._source, self._plan, self._placement, first_step, self._reading
            )
            self._taken = self._stream.shards
            if self._placement.gpus:
                self._taken = Ahead(self._stream.shards, self._placement.gpus)
        self._is_at_start = False
        return self._taken

    def position(self) -> Position | None:
        return None

    def end_epoch(self) -> None:
        pass

    def end_pass(self, whole: bool = False) -> None:
        # In an order that stays, the next pass is the same: what is read ahead begins it.
        self._is_at_start = whole and self._plan.seed is None and self.error is None
        if not self._is_at_start:
            self.close()

    def begin_after(self, passes: int) -> None:
        self.passes = passes

    @property
    def error(self) -> Exception | None:
        return self._stream.error if self._stream else None

    @property
    def threads(self) -> int | None:
        return self._stream.threads if self._stream else self._reading.threads

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class DatasetFeed:
    """A `tf.data.Dataset`, PyDataset, generator or DataLoader of global batches."""

    endless = False

    def __init__(self, x: Any, class_weight: Any, placement: Placement) -> None:
        self._x, self._class_weight, self._placement = x, class_weight, placement
        self._build()
        if self.steps == 0:
            raise DataError("the data has no batches. Give a Dataset that yields at least one.")
        self.passes = 0
        self._in_order = x if isinstance(x, _InOrder) else None
        self._is_too_large = False
        self._is_used = False  # the readers of a PyDataset may hold batches of an earlier pass
        self._iterator: Any = None
        endless = isinstance(x, keras.utils.PyDataset) and x.num_batches is None
        self._without_end = x if endless else None

    def _build(self) -> None:
        try:
            self._adapter = keras_compat.batches_of(self._x, self._class_weight)
        except ValueError as error:
            raise DataError(str(error)) from None
        self._dataset = self._adapter.get_tf_dataset()
        self._shards = pipeline.from_dataset(self._dataset, self._placement)

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

    def iterate(self, first_step: int, skipped: int = 0, position: Position | None = None) -> Any:
        self.passes += 1
        if self._in_order is not None:
            return self._in_order_from(skipped)
        self._adapter.on_epoch_begin()
        self._iterator = iter(self._shards)
        if position is not None and set_position(self._iterator, position):
            return self._iterator
        if position is not None:
            self._iterator = iter(self._shards)  # that one is left somewhere
        for _ in range(skipped):
            next(self._iterator)
        return self._iterator

    def _in_order_from(self, batch: int) -> Any:
        """Returns an iterator of the rest of a PyDataset's pass."""
        assert self._in_order is not None
        self._in_order.begin_at = 0
        if self._is_used:
            self._build()
        self._in_order.begin_at, self._is_used = batch, True
        self._adapter.on_epoch_begin()
        return iter(self._shards.take(len(self._in_order) - batch) if batch else self._shards)

    def position(self) -> Position | None:
        # Another pass of a Dataset that ends may draw its order by what the last one has left,
        # which no position holds: only what goes on for ever is put back.
        if self._in_order is not None or not self.holds(None) or self._is_too_large:
            return None
        found = position_of(self._iterator)
        self._is_too_large = found is None  # for good: to find it out takes long
        return found

    def end_epoch(self) -> None:
        if self._without_end is not None:  # others may shuffle for the next pass, not within one
            self._without_end.on_epoch_end()
            self._without_end.on_epoch_begin()

    def end_pass(self, whole: bool = False) -> None:
        self._adapter.on_epoch_end()
        if self._in_order is not None and whole:
            self._is_used = self._in_order.begin_at > 0

    def begin_after(self, passes: int) -> None:
        for _ in range(passes):
            if self._in_order is not None:  # without its readers: nothing is read
                self.passes += 1
                self._in_order.on_epoch_begin()
                self._in_order.on_epoch_end()
            else:
                self.iterate(0)  # an iterator draws the seed of its shuffle when it is made
                self.end_pass()

    @property
    def error(self) -> Exception | None:
        return None

    @property
    def threads(self) -> int | None:
        return None

    def close(self) -> None:
        pass


class _InOrder(keras.utils.PyDataset):
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


def make_feed(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    placement: Placement,
    batch_size: int | None = None,
    class_weight: Mapping[int, float] | None = None,
    seed: int | None = None,
    steps_per_epoch: int | None = None,
    reading: Reading = DEFAULT,
) -> Feed:
    """Returns the feed of what Keras' `fit` takes: arrays, a Dataset, a PyDataset, ….

    Args:
        batch_size: the global batch, for arrays; what comes in batches keeps its own.
        seed: shuffles anew each epoch; None keeps the order. A `tf.data.Dataset` or a
            generator has its own order.

    Raises:
        DataError: the arrays differ in length, or an argument does not go with the data.
    """
    if isinstance(x, (SourceFeed, DatasetFeed)):
        return x
    if isinstance(x, Source):
        _check_no_more(x, y=y, sample_weight=sample_weight)
        if class_weight is not None:
            x = Weighted(x, class_weight)
        size = batch_size or DEFAULT_BATCH_SIZE
        return SourceFeed(x, Plan(len(x), size, seed), placement, reading)
    if isinstance(x, tf.distribute.DistributedDataset):
        raise ModelError(
            "a DistributedDataset was given, which hides how many rows each replica gets. Give "
            "the tf.data.Dataset of global batches itself; tfmulti shares out its rows."
        )
    if _is_batched(x):
        _check_no_more(x, y=y, sample_weight=sample_weight)
        if isinstance(x, keras.utils.PyDataset) and x.num_batches is not None:
            x = _InOrder(x, seed)
        return DatasetFeed(x, class_weight, placement)
    if class_weight is not None:
        sample_weight = weights_of_classes(y, class_weight, sample_weight)
    source = ArraySource(keras.utils.pack_x_y_sample_weight(x, y, sample_weight))
    if batch_size is None and steps_per_epoch:
        batch_size = -(-len(source) // steps_per_epoch)
    return make_feed(source, placement=placement, batch_size=batch_size, seed=seed, reading=reading)


def _check_no_more(x: Any, **given: Any) -> None:
    """Raises DataError where targets or weights were given beside data that holds them."""
    for name, value in given.items():
        if value is not None:
            raise DataError(
                f"{name} does not go with a {type(x).__name__}, which holds targets and weights "
                "itself."
            )


def _is_batched(x: Any) -> bool:
    if isinstance(x, (tf.data.Dataset, keras.utils.PyDataset, Iterator)):
        return True
    return type(x).__module__.partition(".")[0] in ("torch", "grain") and hasattr(x, "__iter__")


def weights_of_classes(
    y: Any, class_weight: Mapping[int, float], sample_weight: Any = None
) -> np.ndarray:
    """Returns each row's weight by its label (whole numbers, or one-hot), float32 [rows].

    Raises:
        DataError: there are sample weights too, or several outputs.
    """
    if sample_weight is not None:
        raise DataError("class_weight and sample_weight were both given. Give one of them.")
    if isinstance(y, (Mapping, tuple, list)):
        raise DataError("class_weight needs one output with labels, but y has several parts.")
    labels = np.asarray(y)
    if labels.ndim > 1 and labels.shape[-1] > 1:
        labels = labels.argmax(-1)
    labels = labels.reshape(len(labels)).round().astype(np.int64)
    weights = np.ones(len(labels), np.float32)
    for label, weight in class_weight.items():
        weights[labels == label] = weight
    return weights


def split_off_validation(parts: tuple[Any, ...], fraction: float) -> tuple[Any, Any]:
    """Returns arrays without their last rows, and those rows: Keras' `validation_split`.

    Raises:
        DataError: the data is no arrays, or one of the parts would be empty.
    """
    if _is_batched(parts[0]) or isinstance(parts[0], Source):
        raise DataError(
            "validation_split needs arrays: a Dataset is split by its take() and skip(), a Source "
            "by tfmulti.sources.source.Part."
        )
    source = ArraySource(tuple(part for part in parts if part is not None))
    at = int(len(source) * (1 - fraction))
    if not 0 < at < len(source):
        raise DataError(f"validation_split {fraction} of {len(source)} rows leaves one part empty.")
    first = iter(map_nest(lambda a: a[:at], source.data))
    last = iter(map_nest(lambda a: a[at:], source.data))
    return tuple(
        tuple(None if part is None else next(rows) for part in parts) for rows in (first, last)
    )  # type: ignore[return-value]
